// Attention of a layer: one tile per head, with the weights of one query patch.

import { ask, decode } from "./api.js";
import { makeScale, paintOverlay } from "./colors.js";
import { find, locate } from "./dom.js";
import { describeLayout, findGrid } from "./layout.js";
import { drawTiles, showScale } from "./maps.js";
import { findLayer, makeBody, makeView } from "./requests.js";
import { fit } from "./seen.js";

let shown = null; // for one layer and picture: {weights, heads, tokens, layout, state, asks}; weights by query, for all queries asked so far

async function askQuery(state, signal) {
  const reply = await ask("extract", makeBody(state, makeView(state).layers), signal);
  return { receipt: reply.receipts.maps, values: decode(reply.features.maps).values };
}

export async function showAttention(state, signal) {
  if (state.token >= findLayer(state).attention.at(-1).shape[2]) state.token = 0;
  const { receipt, values } = await askQuery(state, signal);
  const [windows, heads, queries, tokens] = receipt.captured;
  const grid = findGrid(tokens, receipt, state.layers);
  if (windows !== 1 || queries !== tokens || !grid.height) {
    find("maps").replaceChildren();
    showScale(null);
    find("reading").textContent = "The tokens of this attention are no grid of patches.";
    return;
  }
  shown = { weights: new Map([[state.token, values]]), heads, tokens, layout: describeLayout([tokens, 1], "NTC", grid), state, asks: false };
  find("token-field").hidden = false;
  find("token").max = String(tokens - 1);
  find("token").value = String(state.token);
  draw();
}

async function look(signal) {
  // Show the current query; if the pointer moves during a request, its new position is requested next.
  const mine = shown;
  const { weights, state } = mine;
  mine.asks = true;
  try {
    while (!weights.has(state.token)) {
      const { token } = state;
      weights.set(token, (await askQuery(state, signal)).values);
    }
  } finally {
    mine.asks = false;
  }
  draw();
}

function draw() {
  const { weights, heads, tokens, layout, state } = shown;
  const values = weights.get(state.token);
  const maps = Array.from({ length: heads }, (_, head) => {
    const name = `head ${head}`;
    return { ...layout, values: values.subarray(head * tokens + layout.skip, (head + 1) * tokens), channel: head, label: name, title: `${state.layer}, ${name}` };
  });
  const read = (text) => {
    find("reading").textContent = text;
  };
  showScale(drawTiles(find("maps"), maps, { each: state.each, onRead: read }));
  const mean = maps[0].values.map((_, at) => maps.reduce((sum, map) => sum + map.values[at], 0) / heads);
  paintOverlay(find("overlay"), { ...layout, values: mean }, makeScale(mean));
  fit(find("overlay"), state.seen);
  find("overlay").hidden = find("picture").hidden;
  read(`What token ${state.token} looks at, a tile for each head; over the picture their mean. Move over the picture to choose a patch.`);
}

export function forgetAttention() {
  shown = null;
  for (const id of ["overlay", "token-field"]) find(id).hidden = true;
}

export function installAttention(state, run) {
  const choose = (token) => {
    if (token === state.token) return;
    state.token = token;
    if (!shown.asks) run(look);
  };
  find("token").addEventListener("input", () => shown && find("token").checkValidity() && choose(Number(find("token").value)));
  find("overlay").addEventListener("pointermove", (event) => {
    if (!shown) return;
    const { width, height, skip } = shown.layout;
    const [x, y] = locate(find("overlay"), event, width, height);
    choose(skip + y * width + x);
    find("token").value = String(state.token);
  });
}
