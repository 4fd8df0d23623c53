// The explorer: a picture, a model, a layer, and views of it. Everything shown comes from the public API.

import { ask, keepKey } from "./api.js";
import { installAttention } from "./attention.js";
import { installClasses, markClass, showClasses } from "./classes.js";
import { installCompare, showComparison } from "./compare.js";
import { element, find } from "./dom.js";
import { forgetExplanations, markMethods, showExplanation, showMethods } from "./explain.js";
import { readHash, writeHash } from "./link.js";
import { installZoom } from "./maps.js";
import { addPlace, installPictures, readLast, SAMPLES, takeSample } from "./picture.js";
import { makeRunner } from "./runner.js";
import { installSnippets, showSnippet } from "./snippets.js";
import { chooseLayer, makeState } from "./state.js";
import { installTree, mark, reveal, showLayers, showTypes } from "./tree.js";
import { forgetChange, forgetLayer, forgetView, loadMore, showView } from "./view.js";

const state = makeState();
const { run, stop, retry, isWaiting } = makeRunner(async () => {
  await listModels();
  return state.entry;
});

async function listModels(signal) {
  const reply = await ask("models", null, signal);
  state.models = reply.models;
  state.limits = reply.limits;
  if (!state.model) state.model = reply.default;
  const options = reply.models.map((model) => {
    const option = element("option", model.state === "ready" ? model.name : `${model.name} (${model.state})`);
    option.value = model.name;
    return option;
  });
  find("model").replaceChildren(...options);
  find("model").value = state.model;
  find("model-note").textContent = state.entry?.state === "failed" ? `failed: ${state.entry.reason || "no reason is known"}` : "";
}

async function openModel(signal) {
  if (!state.models.length) await listModels(signal);
  const reply = await ask(`models/${encodeURIComponent(state.model)}/layers`, null, signal);
  state.layers = reply.layers;
  showTypes(state.layers);
  const isNamed = state.layers.some((layer) => layer.name === state.layer);
  if (!isNamed) state.layer = chooseLayer(state.layers);
  list();
  if (isNamed) reveal();
  await listModels(signal);
  refresh();
}

function list() {
  showLayers(state.layers, state.layer, (layer) => {
    Object.assign(state, { layer: layer.name, shown: 16 });
    mark(state.layer);
    stop("change");
    forgetChange();
    showMaps();
    compare();
  });
}

function refresh() {
  // Update everything that depends on the picture: the layer's maps first.
  if (!state.picture || !state.layer) return writeHash(state);
  showMaps();
  run((signal) => showClasses(state, chooseClass, signal), "classes");
  showMethods(state, toggleMethod);
  explain();
  compare();
}

function showMaps() {
  writeHash(state);
  run(showLayer, "maps");
}

async function showLayer(signal) {
  if (!state.picture) return "Choose a picture first.";
  await showView(state, signal);
  showSnippet(state);
  return "";
}

function explain(methods = state.methods) {
  writeHash(state);
  if (!state.picture) return;
  for (const name of methods) run((signal) => showExplanation(state, name, signal), `explanation ${name}`);
}

function toggleMethod(name) {
  const chosen = state.methods.includes(name);
  state.methods = chosen ? state.methods.filter((each) => each !== name) : [...state.methods, name];
  if (chosen) stop(`explanation ${name}`);
  markMethods(state);
  explain(chosen ? [] : [name]);
}

function chooseClass(text) {
  state.class = text;
  markClass(state);
  explain();
  if (state.site === "grad_output") showMaps();
}

function compare() {
  writeHash(state);
  if (!state.picture || !state.layers.length) return;
  run((signal) => showComparison(state, signal), "compare");
}

function takePicture(give, name, sample = "") {
  run(async (signal) => {
    const picture = await readLast(state, give, name, sample, state.limits);
    if (!picture) return;
    if (state.picture) URL.revokeObjectURL(state.picture.url);
    Object.assign(state, { picture, token: 0 });
    const image = find("picture");
    image.src = picture.url;
    image.alt = `The picture ${name}`;
    image.hidden = !picture.width;
    find("picture-name").textContent = name;
    forgetView();
    forgetExplanations();
    await (state.layers.length ? refresh() : openModel(signal));
  });
}

function takeOther(give, name, sample = "") {
  run(async () => {
    const picture = await readLast(state.other, give, name, sample, state.limits);
    if (!picture) return;
    state.other.picture = picture;
    compare();
  }, "compare");
}

function installChoices() {
  find("model").addEventListener("change", (event) => {
    Object.assign(state, { model: event.target.value, layers: [], labels: null, layer: "", token: 0, shown: 16, class: "" });
    markClass(state);
    find("tree").replaceChildren();
    forgetLayer();
    forgetExplanations();
    run(openModel);
  });
  for (const id of ["match", "type"]) find(id).addEventListener("input", list);
  find("site").addEventListener("change", (event) => {
    state.site = event.target.value;
    showMaps();
  });
  find("class").addEventListener("change", (event) => chooseClass(event.target.value));
  find("each").addEventListener("change", (event) => {
    state.each = event.target.checked;
    showMaps();
  });
  find("more").addEventListener("click", () => {
    run((signal) => loadMore(state, signal), "maps");
    writeHash(state);
  });
  find("retry").addEventListener("click", retry);
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey(find("key").value.trim());
    find("key").value = "";
    if (isWaiting()) retry();
    else run(openModel);
  });
}

async function restore() {
  const { state: wanted, otherLayer, sample, otherSample } = readHash();
  Object.assign(state, wanted);
  state.other.layer = otherLayer;
  for (const id of ["site", "class"]) find(id).value = state[id];
  find("each").checked = state.each;
  if (Object.hasOwn(SAMPLES, sample)) takeSample(sample, takePicture);
  else run(openModel);
  if (Object.hasOwn(SAMPLES, otherSample)) takeSample(otherSample, takeOther);
}

installPictures();
addPlace({ area: find("drop"), pick: find("pick"), file: find("file"), samples: find("samples") }, takePicture);
addPlace({ area: find("compare"), pick: find("other-pick"), file: find("other-file"), samples: find("other-samples") }, takeOther);
installChoices();
installTree();
installZoom();
installClasses(state, run);
installCompare(state, compare);
installSnippets(state, run);
installAttention(state, (look) => run(async (signal) => {
  await look(signal);
  showSnippet(state);
}, "maps"));
addEventListener("hashchange", () => location.reload()); // another link was entered in the address bar
restore();
