// The requests for the current view.

import { describeLayout } from "./layout.js";
import { findTensor, makeSelector, nameLayer } from "./selectors.js";

export function makeObjective(state) {
  return { kind: "logit", class: state.class === "" ? "top" : Number(state.class) };
}

export function makeBody(side, layers, more = {}) {
  return { model: side.model, inputs: [{ image: side.picture.data }], layers, encoding: "base64", ...more };
}

export function findLayer(side) {
  return side.layers.find((each) => each.name === side.layer);
}

function makeAttentionLayer(state) {
  const path = findLayer(state).attention.at(-1).path;
  return { ...nameLayer(state.layers, state.layer), site: "attention", ...(path ? { path } : {}), queries: [state.token], as: "maps" };
}

export function countChannels(state) {
  // The number of maps of the chosen layer; 0 if it is a vector.
  const tensor = findTensor(findLayer(state));
  const { kind, channels } = describeLayout(tensor.shape.slice(1), tensor.layout);
  return kind === "bars" ? 0 : channels;
}

export function makeView(state) {
  // The fields of a body for the current view: its layers and, for gradients, the objective.
  if (state.site === "attention") return { layers: [makeAttentionLayer(state)] };
  const site = state.site === "output" ? {} : { site: state.site };
  const channels = state.shown < countChannels(state) ? { channels: Array.from({ length: state.shown }, (_, at) => at) } : {};
  const layers = [makeSelector(state.layers, state.layer, { ...site, ...channels, as: "maps" })];
  return state.site === "grad_output" ? { layers, objective: makeObjective(state) } : { layers };
}
