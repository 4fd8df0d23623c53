// Two layers, two models or two pictures beside each other: their maps, and how alike these are.

import { ask, decode } from "./api.js";
import { write } from "./colors.js";
import { element, find } from "./dom.js";
import { readLayout, split } from "./layout.js";
import { drawBars, drawTiles, nameChannels } from "./maps.js";
import { installPlaces, showPlaces } from "./places.js";
import { makeBody } from "./requests.js";
import { findTensor, makeSelector } from "./selectors.js";
import { average, findAlignment, findCosine, findShared, makeField, resample } from "./similarity.js";

const TILES = 8; // of each side
const SAME = "the same";

export function makeComparedLayers(side) {
  return [makeSelector(side.layers, side.layer, { as: "maps" })];
}

async function openOther(state, signal) {
  if (!state.other.model || state.other.layers.length) return;
  state.other.layers = (await ask(`models/${encodeURIComponent(state.other.model)}/layers`, null, signal)).layers;
}

function fillOptions(select, names, chosen) {
  const options = names.map((name) => {
    const option = element("option", name || SAME);
    option.value = name;
    return option;
  });
  select.replaceChildren(...options);
  select.value = chosen;
}

export function showCompareChoices(state) {
  const [, other] = state.sides;
  fillOptions(find("other-model"), ["", ...state.models.map((each) => each.name).filter((name) => name !== state.model)], state.other.model);
  const names = other.layers.filter((layer) => layer.outputs.length).map((layer) => layer.name);
  const chosen = state.other.layer || (other.layer === state.layer ? "" : other.layer);
  fillOptions(find("other-layer"), ["", ...names], names.includes(chosen) ? chosen : "");
  find("other-same").setAttribute("aria-pressed", String(!state.other.picture));
  find("other-name").textContent = state.other.picture ? state.other.picture.name : "";
  find("other-stop").hidden = !state.compares;
}

async function askSide(side, signal) {
  const reply = await ask("extract", makeBody(side, makeComparedLayers(side)), signal);
  const layout = readLayout(reply, "maps", findTensor(side.layers.find((each) => each.name === side.layer)).layout, side);
  const { values } = decode(reply.features.maps);
  return { ...side, layout, values, field: makeField(values, layout), fingerprint: reply.receipts.maps.fingerprint };
}

export async function showComparison(state, signal) {
  find("compare-result").hidden = !state.compares;
  state.compared = null;
  showCompareChoices(state);
  if (!state.compares || !state.picture) return;
  if (find("sides").hidden) say("Asking …");
  find("compare-result").classList.add("asking"); // what is there stays, faint, so that nothing jumps
  try {
    await openOther(state, signal);
    showCompareChoices(state);
    const sides = await Promise.all(state.sides.map((side) => askSide(side, signal)));
    state.compared = { sides, ...measure(...sides) };
  } catch (error) {
    if (!signal.aborted) say(error.status === 503 ? "No answer yet." : "No answer.");
    throw error;
  } finally {
    if (!signal.aborted) find("compare-result").classList.remove("asking");
  }
  draw(state.compared);
}

function say(text) {
  find("similarity").replaceChildren();
  find("similarity-note").textContent = text;
  for (const id of ["sides", "match-reading"]) find(id).hidden = true;
}

function draw({ sides, ...numbers }) {
  for (const id of ["sides", "match-reading"]) find(id).hidden = false;
  const places = [...find("sides").children];
  sides.forEach((side, at) => drawSide(places[at], side));
  showPlaces(places, sides, numbers.cosine !== undefined && sides.every(({ field }) => field.height * field.width > 1));
  showNumbers(numbers);
}

function measure(a, b) {
  // Vectors of one kind have a cosine; of two kinds, of whatever widths, the places have an alignment.
  if (a.fingerprint === b.fingerprint) return { cosine: findCosine(average(a.field), average(b.field)) };
  const whole = [0, 0, 1, 1];
  const one = a.picture === b.picture;
  const shared = findShared(a.field, b.field, one ? a.seen : whole, one ? b.seen : whole);
  const count = shared ? shared.rows * shared.columns : 0;
  if (count < 2) return { shared: null };
  const [x, y] = [a, b].map(({ field }, at) => resample(field, shared.rows, shared.columns, shared.boxes[at]));
  return { shared, one, ...findAlignment(x, y, count) };
}

function drawSide(place, side) {
  place.querySelector(".name").textContent = side.layer === "." ? "The whole model" : side.layer;
  place.querySelector(".quiet").textContent = `${side.model} · ${side.picture.name} · ${describeSize(side.layout)}`;
  const tiles = place.querySelector(".tiles");
  if (side.layout.kind === "bars") return drawBars(tiles, side.values);
  const maps = split(side.values, side.layout, side.layout.channels).slice(0, TILES);
  return drawTiles(tiles, nameChannels(maps, side.layer), {});
}

function describeSize({ kind, channels, height, width }) {
  return kind === "bars" ? `${width} values` : `${channels} × ${height} × ${width}`;
}

function showNumbers({ cosine, cka, debiased, shared, one }) {
  const rows = cosine === undefined ? { "linear CKA": cka, debiased } : { "cosine of the mean vectors": cosine };
  const pairs = Object.entries(shared === null ? {} : rows).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", Number.isFinite(value) ? write(value) : "none"));
    return pair;
  });
  find("similarity").replaceChildren(...pairs);
  find("similarity-note").textContent = describeNumbers({ cosine, shared, one });
}

function describeNumbers({ cosine, shared, one }) {
  if (cosine !== undefined) return "1: the vectors, means over all places, point the same way. 0: they have nothing in common.";
  if (!shared) return "The two have no places in common, and vectors of two kinds have no cosine.";
  const { rows, columns } = shared;
  const text = `Over ${rows * columns} places (${rows} × ${columns}), for any two widths. 1: the same up to rotation and scale; 0: unrelated. Few places raise the first number, not the second.`;
  return one ? text : `${text} The pictures differ: places are matched by where they are.`;
}

export function installCompare(state, compare) {
  installPlaces([...find("sides").children]);
  find("other-model").addEventListener("change", (event) => {
    Object.assign(state.other, { model: event.target.value, layers: [], layer: "" });
    compare();
  });
  find("other-layer").addEventListener("change", (event) => {
    state.other.layer = event.target.value;
    compare();
  });
  find("other-same").addEventListener("click", () => {
    Object.assign(state.other, { picture: null, given: null });
    compare();
  });
  find("other-stop").addEventListener("click", () => {
    Object.assign(state.other, { model: "", layers: [], layer: "", picture: null, given: null });
    compare();
    find("other-layer").focus();
  });
}

