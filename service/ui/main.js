// The explorer: a picture, a model, a layer, and what of it is on the screen. All that is shown is asked of the public API.

import { ask, encode, keepKey, ProblemError } from "./api.js";
import { installAttention } from "./attention.js";
import { installClasses, showClasses } from "./classes.js";
import { installExplain, showExplanation } from "./explain.js";
import { element, find, installZoom } from "./maps.js";
import { readHash, showSnippet, writeHash } from "./share.js";
import { installTree, mark, showLayers, showTypes } from "./tree.js";
import { forgetView, loadMore, showView } from "./view.js";

const SAMPLES = { "digit-2": "A two", "digit-0": "A zero", shapes: "Shapes" };
const ACTIVATIONS = new Set(["ReLU", "ReLU6", "GELU", "SiLU", "Hardswish"]);
const RETRIES = 40;

export const state = { models: [], limits: {}, model: "", layers: [], layer: "", picture: null, site: "output", each: false, class: "", method: "", shown: 16 };
const waiting = new Map(); // what a retry does again, by parts of the page
const asking = {}; // by parts of the page, what is asked now; a newer choice ends it
let pending = 0;

function say(text) {
  find("status").textContent = text;
}

function clearProblem() {
  find("problem").hidden = true;
  find("key-form").hidden = true;
}

async function showProblem(error, again, part, tries) {
  // A problem in words, and what helps: a key, a wait, a button. Returns what is to be said meanwhile.
  if (error.name === "AbortError") return "";
  if (!(error instanceof ProblemError)) throw error;
  waiting.set(part, again);
  if (error.status === 401) {
    find("key-form").hidden = false;
    find("key").focus();
  }
  const entry = error.status === 503 ? await findModel() : null;
  const failed = entry && entry.state === "failed";
  find("problem-text").textContent = failed && entry.reason ? `${error.message} (${entry.reason})` : error.message;
  find("problem-hint").textContent = error.hint;
  find("problem").hidden = error.status === 401 && !sessionStorage.getItem("layertap-key");
  find("retry").hidden = ![0, 429, 503, 504].includes(error.status) || failed;
  if (error.status !== 503 || failed || tries >= RETRIES) return "";
  const { signal } = asking[part];
  setTimeout(() => !signal.aborted && run(again, part, tries + 1), Math.max(error.seconds, 0.5) * 1000);
  return "The model is loading …";
}

async function findModel() {
  try {
    await listModels();
  } catch {
    return null;
  }
  return state.models.find((each) => each.name === state.model);
}

async function run(action, part = "all", tries = 0) {
  // In each part of the page one thing at a time: what was asked before is given up, of all parts by what is of all.
  for (const each of part === "all" ? Object.keys(asking) : [part]) {
    asking[each]?.abort();
    waiting.delete(each);
  }
  asking[part] = new AbortController();
  const { signal } = asking[part];
  let text = "";
  pending += 1;
  say("Asking …");
  try {
    text = (await action(signal)) ?? "";
    if (waiting.size === 0) clearProblem();
  } catch (error) {
    if (!signal.aborted) text = await showProblem(error, action, part, tries);
  } finally {
    pending -= 1;
    if (pending === 0) say(text);
  }
}

function retry() {
  for (const [part, again] of [...waiting]) run(again, part);
}

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
  const entry = reply.models.find((each) => each.name === state.model);
  find("model-note").textContent = entry && entry.state === "failed" ? `failed: ${entry.reason || "no reason is known"}` : "";
}

async function openModel(signal) {
  if (!state.models.length) await listModels(signal);
  const reply = await ask(`models/${encodeURIComponent(state.model)}/layers`, null, signal);
  state.layers = reply.layers;
  showTypes(state.layers);
  if (!state.layers.some((layer) => layer.name === state.layer)) state.layer = chooseLayer();
  list();
  await listModels(signal);
  refresh();
}

function chooseLayer() {
  // Maps to begin with: the first that an activation makes, else the first there are, else any layer's output.
  const maps = state.layers.filter((layer) => layer.leaf && layer.outputs.length && ["NCHW", "NHWC"].includes(layer.layout) && Math.min(...layer.outputs.at(-1).shape.slice(1)) > 1);
  const first = maps.find((layer) => ACTIVATIONS.has(layer.type)) || maps[0];
  return (first || state.layers.find((layer) => layer.leaf && layer.outputs.length) || { name: "" }).name;
}

function list() {
  showLayers(state.layers, state.layer, (layer) => {
    Object.assign(state, { layer: layer.name, shown: 16 });
    mark(state.layer);
    if (!state.method) find("overlay").hidden = true; // of the attention of another layer
    showMaps();
  });
}

function refresh() {
  // All that depends on the picture: the layer's maps first.
  if (!state.picture || !state.layer) return writeHash(state);
  showMaps();
  run((signal) => showClasses(state, signal), "classes");
  explain();
}

function showMaps() {
  if (state.site !== "attention" && !state.method) find("overlay").hidden = true;
  writeHash(state);
  run(showLayer, "maps");
}

function explain() {
  writeHash(state);
  run((signal) => showExplanation(state, signal), "explanation");
}

async function showLayer(signal) {
  if (!state.picture) return "Choose a picture first.";
  await showView(state, signal);
  showSnippet(state);
  return "";
}

function refuseLarge(size) {
  const limit = state.limits.max_body_bytes;
  if (!limit || size * 1.34 < limit) return;
  const most = (limit / 1.34 / 2 ** 20).toFixed(1);
  throw new ProblemError(413, `The file has ${(size / 2 ** 20).toFixed(1)} MiB; this server takes about ${most} MiB.`, "choose a smaller picture", 0);
}

function takePicture(blob, name, sample = "") {
  run(async (signal) => {
    refuseLarge(blob.size);
    const bytes = new Uint8Array(await blob.arrayBuffer());
    state.picture = { name, sample, type: blob.type, data: encode(bytes) };
    const image = find("picture");
    URL.revokeObjectURL(image.src);
    image.src = URL.createObjectURL(blob);
    image.alt = `The picture ${name}`;
    image.hidden = false;
    find("overlay").hidden = true;
    find("picture-name").textContent = name;
    forgetView();
    await (state.layers.length ? refresh() : openModel(signal));
  });
}

async function takeSample(name) {
  const reply = await fetch(`ui/${name}.png`);
  takePicture(await reply.blob(), `${name}.png`, name);
}

function installPicture() {
  const drop = find("drop");
  for (const kind of ["dragover", "dragenter"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  document.addEventListener("dragleave", () => drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    const file = event.dataTransfer?.files[0];
    if (file) takePicture(file, file.name);
  });
  document.addEventListener("paste", (event) => {
    const file = event.clipboardData?.files[0];
    if (file) takePicture(file, file.name || "pasted");
  });
  find("pick").addEventListener("click", () => find("file").click());
  find("file").addEventListener("change", (event) => {
    const file = event.target.files[0];
    if (file) takePicture(file, file.name);
    event.target.value = "";
  });
  find("picture").addEventListener("error", () => {
    find("picture").hidden = true;
  });
  for (const [name, title] of Object.entries(SAMPLES)) {
    const button = element("button", undefined, { type: "button", "aria-label": `Sample: ${title}`, "data-sample": name });
    button.append(element("img", undefined, { src: `ui/${name}.png`, alt: "" }));
    button.addEventListener("click", () => takeSample(name));
    find("samples").append(button);
  }
}

function installChoices() {
  find("model").addEventListener("change", (event) => {
    Object.assign(state, { model: event.target.value, layers: [], layer: "", shown: 16, class: "" });
    find("class").value = "";
    find("tree").replaceChildren();
    forgetView();
    run(openModel);
  });
  for (const id of ["match", "type"]) find(id).addEventListener("input", list);
  find("site").addEventListener("change", (event) => {
    state.site = event.target.value;
    showMaps();
    explain();
  });
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
    if (waiting.size) retry();
    else run(openModel);
  });
}

function restore() {
  const wanted = readHash();
  Object.assign(state, wanted.state);
  for (const id of ["site", "method", "class"]) find(id).value = state[id];
  find("each").checked = state.each;
  if (wanted.sample in SAMPLES) takeSample(wanted.sample);
  else run(openModel);
}

installPicture();
installChoices();
installTree();
installZoom();
installClasses(state, run);
installExplain(state, explain, () => state.site === "grad_output" && showMaps());
installAttention();
restore();
