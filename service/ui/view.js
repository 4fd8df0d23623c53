// The view of the chosen layer: its maps, the value under the pointer.

import { ask, decode, ProblemError } from "./api.js";
import { forgetAttention, showAttention } from "./attention.js";
import { find } from "./dom.js";
import { readLayout, split } from "./layout.js";
import { drawBars, drawTiles, nameChannels, showScale } from "./maps.js";
import { countChannels, findLayer, makeBody, makeView } from "./requests.js";
import { findTensor } from "./selectors.js";
import { writeShape } from "./tree.js";

const STEP = 16; // channels per request
const PASSING = [0, 401, 429, 503]; // statuses after which the same request is repeated
const PARTS = ["view-tools", "more", "share", "change", "compare"];

export async function showView(state, signal) {
  const layer = findLayer(state);
  chooseSite(state, layer);
  try {
    await showSite(state, layer, signal);
  } catch (error) {
    if (error instanceof ProblemError && !PASSING.includes(error.status)) showNothing(layer);
    throw error;
  }
}

async function showSite(state, layer, signal) {
  if (state.site === "attention") {
    await showAttention(state, signal);
    showFacts(layer);
    find("more").hidden = true;
    return;
  }
  const { layers, ...more } = makeView(state);
  const reply = await ask("extract", makeBody(state, layers, more), signal);
  showFacts(layer);
  draw(state, readLayout(reply, "maps", findTensor(layer).layout, state), decode(reply.features.maps).values);
}

function showNothing(layer) {
  // After a refused request: show the layer's name and other choices, not the previous layer's maps.
  forgetAttention();
  showFacts(layer);
  find("maps").replaceChildren();
  find("reading").textContent = "";
  for (const id of ["scale", "more", "share"]) find(id).hidden = true;
}

function showFacts(layer) {
  const parameters = layer.parameters ? `${layer.parameters.toLocaleString("en")} parameters` : "";
  find("steps").hidden = true;
  find("view-title").textContent = layer.name === "." ? "The whole model" : layer.name;
  find("view-facts").textContent = [layer.type, writeShape(layer), parameters, ...layer.hazards].filter(Boolean).join(" · ");
  for (const id of PARTS) find(id).hidden = false;
}

function chooseSite(state, layer) {
  // Hide attention for layers without it.
  forgetAttention();
  const option = find("site").querySelector("[value=attention]");
  option.hidden = option.disabled = !layer.attention.length;
  if (state.site === "attention" && option.disabled) state.site = "output";
  find("site").value = state.site;
}

function draw(state, layout, values) {
  const read = (text) => {
    find("reading").textContent = text;
  };
  read(describeTokens(layout));
  if (layout.kind === "bars") {
    find("more").hidden = true;
    drawBars(find("maps"), values, read);
    return showScale(null);
  }
  const maps = nameChannels(split(values, layout, layout.channels), state.layer);
  showScale(drawTiles(find("maps"), maps, { each: state.each, signed: state.site === "grad_output", onRead: read }));
  const channels = countChannels(state);
  find("more").hidden = maps.length >= channels;
  find("more").textContent = `${Math.min(STEP, channels - maps.length)} more of ${channels} channels`;
}

function describeTokens({ skip, height, width }) {
  return skip ? `${height} × ${width} tokens, without ${skip} prefix token${skip > 1 ? "s" : ""}` : "";
}

export async function loadMore(state, signal) {
  state.shown += STEP;
  const before = state.shown - STEP;
  await showView(state, signal);
  find("maps").children[before]?.focus();
}

export function forgetView() {
  // Remove everything that shows another picture or model.
  forgetAttention();
  for (const id of PARTS) find(id).hidden = true;
  find("maps").replaceChildren();
  find("reading").textContent = "";
  for (const id of ["scale", "classes", "lens"]) find(id).hidden = true;
  forgetChange();
}

export function forgetLayer() {
  // As forgetView, also for another layer that is not known yet.
  forgetView();
  find("view-title").textContent = "See what a layer sees";
  find("view-facts").textContent = "";
}

export function forgetChange() {
  find("change-result").hidden = true;
}
