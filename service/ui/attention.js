// Attention of a layer: a tile for each head, of what one patch of the picture looks at.

import { ask, decode } from "./api.js";
import { makeScale, paintOverlay } from "./colors.js";
import { find, locate } from "./dom.js";
import { describeLayout, findGrid } from "./layout.js";
import { drawTiles, showScale } from "./maps.js";
import { makeBody, makeView } from "./requests.js";
import { fit } from "./seen.js";

let shown = null; // weights of one layer: {values, heads, tokens, layout, state}

export async function showAttention(state, signal) {
  const reply = await ask("extract", makeBody(state, makeView(state).layers), signal);
  const { shape, values } = decode(reply.features.maps);
  const [windows, heads, queries, tokens] = shape;
  const grid = findGrid(tokens, reply.receipts.maps, state.layers, state.entry?.inputs[0]);
  if (windows !== 1 || queries !== tokens || !grid.height) {
    find("maps").replaceChildren();
    find("overlay").hidden = true;
    showScale(null);
    find("reading").textContent = "The tokens of this attention are no grid of patches.";
    return;
  }
  shown = { values, heads, tokens, layout: describeLayout([tokens, 1], "NTC", grid), state };
  find("token-field").hidden = false;
  find("token").max = String(tokens - 1);
  if (Number(find("token").value) >= tokens) find("token").value = "0";
  draw();
}

function draw() {
  const { values, heads, tokens, layout, state } = shown;
  const query = Number(find("token").value);
  const maps = Array.from({ length: heads }, (_, head) => {
    const from = (head * tokens + query) * tokens;
    const name = `head ${head}`;
    return { ...layout, values: values.subarray(from + layout.skip, from + tokens), channel: head, label: name, title: `${state.layer}, ${name}` };
  });
  const read = (text) => {
    find("reading").textContent = text;
  };
  showScale(drawTiles(find("maps"), maps, { each: state.each, onRead: read }));
  const mean = maps[0].values.map((_, at) => maps.reduce((sum, map) => sum + map.values[at], 0) / heads);
  paintOverlay(find("overlay"), { ...layout, values: mean }, makeScale(mean));
  fit(find("overlay"), state.seen);
  find("overlay").hidden = find("picture").hidden;
  read(`What token ${query} looks at, a tile for each head; over the picture their mean. Move over the picture to choose a patch.`);
}

export function forgetAttention() {
  shown = null;
  find("token-field").hidden = true;
}

export function installAttention() {
  find("token").addEventListener("input", () => shown && find("token").checkValidity() && draw());
  find("overlay").addEventListener("pointermove", (event) => {
    if (!shown) return;
    const { width, height, skip } = shown.layout;
    const [x, y] = locate(find("overlay"), event, width, height);
    const token = String(skip + y * width + x);
    if (token === find("token").value) return;
    find("token").value = token;
    draw();
  });
}
