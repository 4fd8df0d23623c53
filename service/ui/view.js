// What of the chosen layer is on the screen: its maps, its statistics, the value under the pointer.

import { ask, decode } from "./api.js";
import { forgetAttention, makeAttentionLayer, showAttention } from "./attention.js";
import { write } from "./colors.js";
import { describeLayout, drawBars, drawTiles, element, fillBars, find, split, zoom } from "./maps.js";
import { writeShape } from "./tree.js";

const STEP = 16; // channels at once
const PARTS = ["view-tools", "scale", "more", "numbers", "share", "change"];

export function makeSelector(state, more = {}) {
  // The layer's last call; of a structured value its first tensor.
  const layer = state.layers.find((each) => each.name === state.layer);
  const path = layer?.outputs.at(-1)?.path;
  const first = layer?.outputs.find((each) => each.call === layer.calls - 1)?.path ?? path;
  return { layer: state.layer, ...(first ? { path: first } : {}), ...more };
}

export function makeBody(state, layers) {
  const body = { model: state.model, inputs: [{ image: state.picture.data }], layers, encoding: "base64" };
  return layers.some((each) => each.site === "grad_output") ? { ...body, objective: makeObjective(state) } : body;
}

export function makeObjective(state) {
  return { kind: "logit", class: state.class === "" ? "top" : Number(state.class) };
}

export function makeViewLayers(state) {
  // The entries of `layers` for what is on the screen.
  if (state.site === "attention") return [makeAttentionLayer(state)];
  const site = state.site === "output" ? {} : { site: state.site };
  const layout = layoutOf(state);
  const count = Math.min(state.shown, layout.channels);
  const channels = layout.kind === "bars" || count === layout.channels ? {} : { channels: Array.from({ length: count }, (_, at) => at) };
  return [makeSelector(state, { ...site, ...channels, as: "maps" }), makeSelector(state, { ...site, stats: true, as: "stats" })];
}

function layoutOf(state) {
  const layer = state.layers.find((each) => each.name === state.layer);
  const tensor = layer.outputs.find((each) => each.call === layer.calls - 1) ?? layer.outputs.at(-1);
  return describeLayout(tensor.shape.slice(1), tensor.layout);
}

export async function showView(state, signal) {
  const layer = state.layers.find((each) => each.name === state.layer);
  chooseSite(state, layer);
  if (state.site === "attention") {
    await showAttention(state, signal);
    showFacts(layer);
    for (const id of ["more", "numbers"]) find(id).hidden = true;
    return;
  }
  const reply = await ask("extract", makeBody(state, makeViewLayers(state)), signal);
  const { shape, values } = decode(reply.features.maps);
  const tensor = layer.outputs.find((each) => each.call === layer.calls - 1) ?? layer.outputs.at(-1);
  const layout = describeLayout(shape.slice(1), tensor.layout);
  showFacts(layer);
  draw(state, layout, values, layoutOf(state).channels);
  showNumbers(decode(reply.features.stats).values, reply.receipts.stats.stats);
}

function showFacts(layer) {
  find("view-title").textContent = layer.name === "." ? "The whole model" : layer.name;
  find("view-facts").textContent = [layer.type, writeShape(layer), `${layer.parameters.toLocaleString("en")} parameters`, ...layer.hazards].join(" · ");
  for (const id of PARTS) find(id).hidden = false;
}

function chooseSite(state, layer) {
  // Layers without attention have none to show.
  forgetAttention();
  const option = find("site").querySelector("[value=attention]");
  option.hidden = option.disabled = !layer.attention.length;
  if (state.site === "attention" && option.disabled) state.site = "output";
  find("site").value = state.site;
}

function draw(state, layout, values, channels) {
  const container = find("maps");
  const read = (text) => {
    find("reading").textContent = text;
  };
  read(layout.skip ? `A token a pixel, without ${layout.skip} prefix token${layout.skip > 1 ? "s" : ""}` : "");
  if (layout.kind === "bars") {
    find("more").hidden = true;
    return drawBars(container, values, read);
  }
  const maps = split(values, layout, layout.channels).map((map, channel) => ({ ...map, channel }));
  drawTiles(container, maps, state.each, (map, scale) => zoom(map, scale, `${state.layer}, channel ${map.channel}`), read);
  find("more").hidden = maps.length >= channels;
  find("more").textContent = `${Math.min(STEP, channels - maps.length)} more of ${channels} channels`;
}

export async function loadMore(state, signal) {
  state.shown += STEP;
  const before = state.shown - STEP;
  await showView(state, signal);
  find("maps").children[before]?.focus();
}

function showNumbers(values, names) {
  const counts = [];
  find("stats").replaceChildren();
  names.forEach((name, at) => {
    if (name.startsWith("histogram")) return counts.push(values[at]);
    const shown = name === "zeros" ? `${(values[at] * 100).toFixed(1)} %` : write(values[at]);
    const pair = element("div");
    pair.append(element("dt", name), element("dd", shown));
    return find("stats").append(pair);
  });
  const canvas = find("histogram");
  fillBars(canvas, Float32Array.from(counts), 80);
  const [low, high] = [values[names.indexOf("min")], values[names.indexOf("max")]];
  canvas.setAttribute("aria-label", `Histogram of 16 bins from ${write(low)} to ${write(high)}: ${counts.join(", ")}`);
}

export function forgetView() {
  forgetAttention();
  // Nothing stays on the screen that is of another picture or model.
  for (const id of PARTS) find(id).hidden = true;
  find("maps").replaceChildren();
  find("reading").textContent = "";
  find("classes").hidden = true;
  find("lens").hidden = true;
  find("change-result").hidden = true;
}
