// What a person chose, and what is known of the models: one object, made once.

import { findSeen } from "./seen.js";

const ACTIVATIONS = new Set(["ReLU", "ReLU6", "GELU", "SiLU", "Hardswish"]);

function describeSide(models, model, layers, layer, picture) {
  // A layer of a model for a picture: whose entry that is, and which part of the picture it sees.
  const entry = models.find((each) => each.name === model);
  const seen = findSeen(entry?.preprocess, picture?.width ?? 0, picture?.height ?? 0);
  return { model, layers, layer, picture, entry, seen };
}

export function makeState() {
  return {
    models: [], limits: {}, model: "", layers: [], seconds: 0, labels: null, layer: "", picture: null,
    site: "output", token: 0, each: false, class: "", methods: [], shown: 16,
    other: { model: "", layers: [], layer: "", picture: null }, // what is compared with this; "" and null: the same as here
    get entry() {
      return describeSide(this.models, this.model).entry;
    },
    get seen() {
      return describeSide(this.models, this.model, [], "", this.picture).seen;
    },
    get compares() {
      return Boolean(this.other.model || this.other.layer || this.other.picture);
    },
    get sides() {
      const { model, layers, layer, picture } = this.other;
      const known = model ? layers : this.layers;
      const wanted = layer || this.layer;
      const name = known.some((each) => each.name === wanted) ? wanted : chooseLayer(known);
      return [
        describeSide(this.models, this.model, this.layers, this.layer, this.picture),
        describeSide(this.models, model || this.model, known, name, picture ?? this.picture),
      ];
    },
  };
}

export function chooseLayer(layers) {
  // Maps to begin with: the first that an activation makes, else the first there are, else any layer's output.
  const leaves = layers.filter((layer) => layer.leaf && layer.outputs.length);
  const maps = leaves.filter((layer) => ["NCHW", "NHWC"].includes(layer.layout) && Math.min(...layer.outputs.at(-1).shape.slice(1)) > 1);
  return (maps.find((layer) => ACTIVATIONS.has(layer.type)) ?? maps[0] ?? leaves[0] ?? { name: "" }).name;
}
