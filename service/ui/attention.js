// Attention of a layer: a tile for each head, of what one patch of the picture looks at.

import { ask, decode } from "./api.js";
import { makeScale, paintOverlay } from "./colors.js";
import { fit } from "./explain.js";
import { describeLayout, drawTiles, find, zoom } from "./maps.js";

let shown = null; // weights of one layer: {values, heads, tokens, layout}
let last = null; // the state that they are of

export function makeAttentionLayer(state) {
  const layer = state.layers.find((each) => each.name === state.layer);
  const path = layer.attention.at(-1).path;
  return { layer: state.layer, site: "attention", ...(path ? { path } : {}), as: "maps" };
}

export async function showAttention(state, signal) {
  const body = { model: state.model, inputs: [{ image: state.picture.data }], layers: [makeAttentionLayer(state)], encoding: "base64" };
  const reply = await ask("extract", body, signal);
  const { shape, values } = decode(reply.features.maps);
  const [windows, heads, queries, tokens] = shape;
  const layout = describeLayout([tokens, 1], "NTC");
  if (windows !== 1 || queries !== tokens || layout.height === 1) {
    find("maps").replaceChildren();
    find("reading").textContent = "The tokens of this attention are no square of patches.";
    return;
  }
  shown = { values, heads, tokens, layout };
  last = state;
  find("token-field").hidden = false;
  find("token").max = String(tokens - 1);
  if (Number(find("token").value) >= tokens) find("token").value = "0";
  draw();
}

function draw() {
  const { values, heads, tokens, layout } = shown;
  const query = Number(find("token").value);
  const maps = Array.from({ length: heads }, (_, head) => {
    const from = (head * tokens + query) * tokens;
    return { ...layout, values: values.subarray(from + layout.skip, from + tokens), channel: head, word: "head" };
  });
  const read = (text) => {
    find("reading").textContent = text;
  };
  drawTiles(find("maps"), maps, last.each, (map, scale) => zoom(map, scale, `${last.layer}, head ${map.channel}`), read);
  const mean = maps[0].values.map((_, at) => maps.reduce((sum, map) => sum + map.values[at], 0) / heads);
  paintOverlay(find("overlay"), { ...layout, values: mean }, makeScale(mean));
  fit(find("overlay"), last);
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
    const box = find("overlay").getBoundingClientRect();
    const { width, height, skip } = shown.layout;
    const x = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * width), 0), width - 1);
    const y = Math.min(Math.max(Math.floor(((event.clientY - box.top) / box.height) * height), 0), height - 1);
    const token = String(skip + y * width + x);
    if (token === find("token").value) return;
    find("token").value = token;
    draw();
  });
}
