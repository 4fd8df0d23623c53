// Names layers in requests, whatever characters their names contain.

import { ProblemError } from "./api.js";

const SPECIAL = /[[\]#:/]/g; // characters that selectors read as a path, a call, a site or a function

export function matches(pattern, name) {
  // As the server's globs: * matches any characters, ? one.
  const escaped = pattern.replace(/[.+^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*").replace(/\?/g, ".");
  return new RegExp(`^${escaped}$`, "su").test(name);
}

export function nameLayer(layers, name) {
  // The fields that name one layer; if its name has special characters, a glob that matches only this layer.
  if (name === "." || !/[[\]#:/*?]/.test(name)) return { layer: name };
  const pattern = name.replace(SPECIAL, "?");
  const { type } = layers.find((each) => each.name === name);
  const same = layers.filter((each) => each.name !== "." && each.outputs.length && matches(pattern, each.name));
  if (same.length === 1) return { layer: pattern };
  if (same.filter((each) => each.type === type).length === 1) return { layer: pattern, type };
  throw new ProblemError(422, `No selector names the layer ${name} alone.`, "Choose the layer around it.");
}

export function findTensor(layer) {
  // The first tensor of a layer's last call; undefined if there is none.
  return layer.outputs.find((each) => each.call === layer.calls - 1) ?? layer.outputs.at(-1);
}

export function makeSelector(layers, name, more = {}) {
  const path = findTensor(layers.find((each) => each.name === name))?.path;
  return { ...nameLayer(layers, name), ...(path ? { path } : {}), ...more };
}
