// The user's choices and the known models: one object, created once.

import { findSeen } from "./seen.js";

const ACTIVATIONS = new Set(["ReLU", "ReLU6", "GELU", "SiLU", "Hardswish"]);

export function makeState() {
  return {
    models: [], limits: {}, model: "", layers: [], labels: null, layer: "", picture: null,
    site: "output", token: 0, each: false, class: "", methods: [], shown: 16,
    other: { layer: "", picture: null }, // the other side of a comparison; "" and null: the same as here
    get entry() {
      return this.models.find((each) => each.name === this.model);
    },
    get seen() {
      return this.describeSide(this.layer, this.picture).seen;
    },
    get compares() {
      return Boolean(this.other.layer || this.other.picture);
    },
    get sides() {
      const { layer, picture } = this.other;
      const name = this.layers.some((each) => each.name === layer) ? layer : this.layer;
      return [this.describeSide(this.layer, this.picture), this.describeSide(name, picture ?? this.picture)];
    },
    describeSide(layer, picture) {
      // A layer of the model and a picture, with the part of the picture that it sees.
      const { model, layers, entry } = this;
      return { model, layers, entry, layer, picture, seen: findSeen(entry?.preprocess, picture?.width ?? 0, picture?.height ?? 0) };
    },
  };
}

export function chooseLayer(layers) {
  // The first maps to show: of the first activation, else the first maps, else any layer's output.
  const leaves = layers.filter((layer) => layer.leaf && layer.outputs.length);
  const maps = leaves.filter((layer) => ["NCHW", "NHWC"].includes(layer.layout) && Math.min(...layer.outputs.at(-1).shape.slice(1)) > 1);
  return (maps.find((layer) => ACTIVATIONS.has(layer.type)) ?? maps[0] ?? leaves[0] ?? { name: "" }).name;
}
