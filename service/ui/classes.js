// The model's answer: its top classes, and how they change when channels of the layer do.

import { ask, decode } from "./api.js";
import { element, find } from "./maps.js";
import { makeSelector } from "./view.js";

const TOP = 5;
const NAMED = 100; // of the best classes, which have names

function findScores(state) {
  // The selector of the model's scores, null where its output is no row of classes.
  const layer = state.layers.find((each) => each.name === ".");
  const outputs = layer ? layer.outputs.filter((each) => each.shape.length === 2 && each.dtype.startsWith("float")) : [];
  const tensor = outputs.find((each) => each.path === "[logits]") ?? outputs[0];
  return tensor ? { layer: ".", ...(tensor.path ? { path: tensor.path } : {}) } : null;
}

async function askScores(state, more, signal) {
  const layers = [{ ...findScores(state), as: "scores" }];
  const inputs = [{ image: state.picture.data }];
  const reply = await ask("extract", { model: state.model, inputs, layers, encoding: "base64", ...more }, signal);
  const { values } = decode(reply.features.scores);
  const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const powers = values.map((value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((value) => value / sum);
}

function rank(shares) {
  return [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, TOP);
}

async function askLabels(state, classes, signal) {
  // The names of classes, which an explanation tells of a picture's best ones; of others their numbers.
  const model = state.models.find((each) => each.name === state.model);
  if (!model?.labels) return classes.map(String);
  const reply = await ask("explain", { model: state.model, inputs: [{ image: state.picture.data }], method: "saliency", top_classes: NAMED, encoding: "base64" }, signal);
  const names = new Map((reply.top_classes?.[0] ?? []).map((each) => [each.class, each.label]));
  return classes.map((each) => names.get(each) ?? String(each));
}

function percent(share) {
  return `${(share * 100).toFixed(1)} %`;
}

function listClasses(classes, names, shares) {
  const rows = classes.map((each, at) => {
    const row = element("li");
    const bar = element("meter", undefined, { min: "0", max: "1", "aria-label": `Share of class ${names[at]}` });
    bar.value = shares[each];
    row.append(element("span", names[at], { class: "name" }), element("span", percent(shares[each]), { class: "facts" }), bar);
    return row;
  });
  find("class-list").replaceChildren(...rows);
}

export async function showClasses(state, signal) {
  find("classes").hidden = true;
  find("lens").hidden = false;
  if (!findScores(state)) return;
  const shares = await askScores(state, {}, signal);
  const classes = rank(shares);
  listClasses(classes, classes.map(String), shares);
  find("classes").hidden = false;
  find("class").max = String(shares.length - 1);
  const names = await askLabels(state, classes, signal);
  listClasses(classes, names, shares);
}

function readChannels(text) {
  const numbers = text.split(",").map((each) => each.trim()).filter(Boolean);
  return numbers.length && !/^all$/i.test(text.trim()) ? { channels: numbers.map(Number) } : {};
}

async function showChange(state, signal) {
  const by = Number(find("change-by").value);
  const change = by === 0 ? { op: "zero" } : { op: "scale", by };
  const place = makeSelector(state, readChannels(find("change-channels").value));
  const before = await askScores(state, {}, signal);
  const after = await askScores(state, { interventions: [{ ...place, ...change }] }, signal);
  const classes = [...new Set([...rank(before), ...rank(after)])];
  const names = await askLabels(state, classes, signal);
  const rows = classes.map((each, at) => {
    const row = element("tr");
    row.append(element("th", names[at], { scope: "row" }), element("td", percent(before[each])), element("td", percent(after[each])));
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
