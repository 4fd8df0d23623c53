// The model's top classes, and their change when channels of the layer are edited.

import { ask, decode } from "./api.js";
import { element, find } from "./dom.js";
import { makeBody } from "./requests.js";
import { makeSelector } from "./selectors.js";

const TOP = 5;

export function findScores(state) {
  // The selector of the model's class scores, null if its output is not one row of classes.
  const layer = state.layers.find((each) => each.name === ".");
  const outputs = layer ? layer.outputs.filter((each) => each.shape.length === 2 && each.dtype.startsWith("float")) : [];
  const tensor = outputs.find((each) => each.path === "[logits]") ?? outputs[0];
  return tensor ? { layer: ".", ...(tensor.path ? { path: tensor.path } : {}) } : null;
}

async function askScores(state, more, signal) {
  const reply = await ask("extract", makeBody(state, [{ ...findScores(state), as: "scores" }], more), signal);
  const { values } = decode(reply.features.scores);
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = values.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((value) => value / sum);
}

function rank(shares) {
  return [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, TOP);
}

async function askLabels(state, signal) {
  // The names of a model's classes in order, requested once per model; empty if it has none.
  const path = `models/${encodeURIComponent(state.model)}/labels`;
  state.labels ??= state.entry?.labels ? (await ask(path, null, signal)).labels : [];
  return state.labels;
}

export function nameClass(labels, number) {
  return labels?.[number] ?? String(number);
}

function percent(share) {
  return `${(share * 100).toFixed(1)} %`;
}

function listClasses(state, classes, labels, shares, onChoose) {
  const rows = classes.map((each) => {
    const name = nameClass(labels, each);
    const row = element("li");
    const button = element("button", undefined, { type: "button", "data-class": String(each), "aria-pressed": String(state.class === String(each)) });
    const bar = element("meter", undefined, { min: "0", max: "1", "aria-label": `Share of class ${name}` });
    bar.value = shares[each];
    button.append(element("span", name, { class: "name" }), element("span", percent(shares[each]), { class: "facts" }), bar);
    button.addEventListener("click", () => onChoose(state.class === String(each) ? "" : String(each)));
    row.append(button);
    return row;
  });
  find("class-list").replaceChildren(...rows);
}

export function markClass(state) {
  find("class").value = state.class;
  for (const button of find("class-list").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.class === state.class));
}

export async function showClasses(state, onChoose, signal) {
  find("classes").hidden = true;
  if (!findScores(state)) return;
  const [shares, labels] = await Promise.all([askScores(state, {}, signal), askLabels(state, signal)]);
  listClasses(state, rank(shares), labels, shares, onChoose);
  find("classes").hidden = false;
  find("class").max = String(shares.length - 1);
}

function readChannels(text) {
  const numbers = text.split(",").map((each) => each.trim()).filter(Boolean);
  return numbers.length && !/^all$/i.test(text.trim()) ? { channels: numbers.map(Number) } : {};
}

async function showChange(state, signal) {
  find("change-result").hidden = true;
  const by = Number(find("change-by").value);
  const change = by === 0 ? { op: "zero" } : { op: "scale", by };
  const place = makeSelector(state.layers, state.layer, readChannels(find("change-channels").value));
  const before = await askScores(state, {}, signal);
  const after = await askScores(state, { interventions: [{ ...place, ...change }] }, signal);
  const classes = [...new Set([...rank(before), ...rank(after)])];
  const labels = await askLabels(state, signal);
  const rows = classes.map((each) => {
    const row = element("tr");
    row.append(element("th", nameClass(labels, each), { scope: "row" }), element("td", percent(before[each])), element("td", percent(after[each])));
    return row;
  });
  find("change-result").querySelector("tbody").replaceChildren(...rows);
  find("change-result").hidden = false;
}

export function installClasses(state, run) {
  find("change-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!state.picture || !findScores(state)) return;
    run((signal) => showChange(state, signal), "change");
  });
}
