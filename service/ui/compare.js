// Two layers or two pictures side by side: their maps, and the similarity of vectors of one kind.

import { ask, decode } from "./api.js";
import { write } from "./colors.js";
import { element, find } from "./dom.js";
import { readLayout, split } from "./layout.js";
import { drawBars, drawTiles, nameChannels } from "./maps.js";
import { installPlaces, showPlaces } from "./places.js";
import { makeBody } from "./requests.js";
import { findTensor, makeSelector } from "./selectors.js";
import { average, findCosine, makeField } from "./similarity.js";

const TILES = 8; // on each side
const SAME = "the same";

function showChoices(state) {
  const [, other] = state.sides;
  const names = state.layers.filter((layer) => layer.outputs.length).map((layer) => layer.name);
  const options = ["", ...names].map((name) => {
    const option = element("option", name || SAME);
    option.value = name;
    return option;
  });
  find("other-layer").replaceChildren(...options);
  find("other-layer").value = other.layer === state.layer ? "" : other.layer;
  find("other-same").setAttribute("aria-pressed", String(!state.other.picture));
  find("other-name").textContent = state.other.picture ? state.other.picture.name : "";
  find("other-stop").hidden = !state.compares;
}

async function askSide(side, signal) {
  const reply = await ask("extract", makeBody(side, [makeSelector(side.layers, side.layer, { as: "maps" })]), signal);
  const layout = readLayout(reply, "maps", findTensor(side.layers.find((each) => each.name === side.layer)).layout, side);
  const { values } = decode(reply.features.maps);
  return { ...side, layout, values, field: makeField(values, layout), fingerprint: reply.receipts.maps.fingerprint };
}

export async function showComparison(state, signal) {
  find("compare-result").hidden = !state.compares;
  showChoices(state);
  if (!state.compares || !state.picture) return;
  if (find("sides").hidden) say("Asking …");
  find("compare-result").classList.add("asking"); // the old result stays, faint, so that the page does not jump
  try {
    draw(await Promise.all(state.sides.map((side) => askSide(side, signal))));
  } catch (error) {
    if (!signal.aborted) say(error.status === 503 ? "No answer yet." : "No answer.");
    throw error;
  } finally {
    if (!signal.aborted) find("compare-result").classList.remove("asking");
  }
}

function say(text) {
  find("similarity").replaceChildren();
  find("similarity-note").textContent = text;
  for (const id of ["sides", "match-reading"]) find(id).hidden = true;
}

function draw(sides) {
  const [a, b] = sides;
  const cosine = a.fingerprint === b.fingerprint ? findCosine(average(a.field), average(b.field)) : undefined; // vectors of one kind have one fingerprint
  for (const id of ["sides", "match-reading"]) find(id).hidden = false;
  const places = [...find("sides").children];
  sides.forEach((side, at) => drawSide(places[at], side));
  showPlaces(places, sides, cosine !== undefined && sides.every(({ field }) => field.height * field.width > 1));
  showNumber(cosine);
}

function drawSide(place, side) {
  place.querySelector(".name").textContent = side.layer === "." ? "The whole model" : side.layer;
  place.querySelector(".quiet").textContent = `${side.picture.name} · ${describeSize(side.layout)}`;
  const tiles = place.querySelector(".tiles");
  if (side.layout.kind === "bars") return drawBars(tiles, side.values);
  const maps = split(side.values, side.layout, side.layout.channels).slice(0, TILES);
  return drawTiles(tiles, nameChannels(maps, side.layer), {});
}

function describeSize({ kind, channels, height, width }) {
  return kind === "bars" ? `${width} values` : `${channels} × ${height} × ${width}`;
}

function showNumber(cosine) {
  const pair = element("div");
  pair.append(element("dt", "cosine of the mean vectors"), element("dd", Number.isFinite(cosine) ? write(cosine) : "none"));
  find("similarity").replaceChildren(...(cosine === undefined ? [] : [pair]));
  find("similarity-note").textContent =
    cosine === undefined ? "Vectors of two kinds have no cosine: see their maps." : "1: the vectors, means over all places, point the same way. 0: they have nothing in common.";
}

export function installCompare(state, compare) {
  installPlaces([...find("sides").children]);
  find("other-layer").addEventListener("change", (event) => {
    state.other.layer = event.target.value;
    compare();
  });
  find("other-same").addEventListener("click", () => {
    Object.assign(state.other, { picture: null, given: null });
    compare();
  });
  find("other-stop").addEventListener("click", () => {
    Object.assign(state.other, { layer: "", picture: null, given: null });
    compare();
    find("other-layer").focus();
  });
}
