// How a layer is named to the server: by its name, whatever characters this has.

import { ProblemError } from "./api.js";

const SPECIAL = /[[\]#:/]/g; // what a selector reads as a path, a call, a site or a function

export function matches(pattern, name) {
  // As the server's globs: * any characters, ? one.
  const escaped = pattern.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(`^${escaped}$`, "su").test(name);
}

export function nameLayer(layers, name) {
  // The fields that name one layer: where its name has characters that selectors read, a glob that it alone matches.
  if (name === "." || !/[[\]#:/*?]/.test(name)) return { layer: name };
  const pattern = name.replace(SPECIAL, "?");
  const { type } = layers.find((each) => each.name === name);
  const same = layers.filter((each) => each.name !== "." && each.outputs.length && matches(pattern, each.name));
  if (same.length === 1) return { layer: pattern };
  if (same.filter((each) => each.type === type).length === 1) return { layer: pattern, type };
  throw new ProblemError(422, `No selector names the layer ${name} alone.`, "Choose the layer around it.");
}

export function findTensor(layer) {
  // Of a layer's last call the first tensor; undefined where it has none.
  return layer.outputs.find((each) => each.call === layer.calls - 1) ?? layer.outputs.at(-1);
}

export function makeSelector(layers, name, more = {}) {
  const path = findTensor(layers.find((each) => each.name === name))?.path;
  return { ...nameLayer(layers, name), ...(path ? { path } : {}), ...more };
}
