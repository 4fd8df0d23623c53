// Draws maps: tiles on a scale, bars of a vector, one large map in a dialog.

import { makeScale, paint, paintScale, write } from "./colors.js";
import { element, find, locate, STEPS } from "./dom.js";

export function nameChannels(maps, layer) {
  return maps.map((map, channel) => ({ ...map, channel, label: `channel ${channel}`, title: `${layer}, channel ${channel}` }));
}

export function drawTiles(container, maps, { each = false, signed = false, onRead = () => {} }) {
  // A button for each map, on one scale or each on its own; returns the shared scale, or null.
  const common = makeScale(concatenate(maps), signed);
  const tiles = maps.map((map) => {
    const scale = each ? makeScale(map.values, signed) : common;
    const tile = element("button", undefined, { type: "button", class: "tile", "data-channel": map.channel });
    const canvas = element("canvas");
    paint(canvas, map, scale);
    tile.append(canvas, element("span", String(map.channel)));
    tile.setAttribute("aria-label", `${map.label}, ${write(scale.low)} to ${write(scale.high)}: enlarge`);
    tile.addEventListener("click", () => zoom(map, scale));
    canvas.addEventListener("pointermove", (event) => onRead(describeValue(map, ...locate(canvas, event, map.width, map.height))));
    canvas.addEventListener("pointerleave", () => onRead(""));
    return tile;
  });
  container.replaceChildren(...tiles);
  return each ? null : common;
}

function concatenate(maps) {
  const all = new Float32Array(maps.reduce((sum, map) => sum + map.values.length, 0));
  let at = 0;
  for (const map of maps) {
    all.set(map.values, at);
    at += map.values.length;
  }
  return all;
}

export function showScale(scale) {
  find("scale").hidden = !scale;
  if (!scale) return;
  paintScale(find("scale-bar"), scale);
  find("scale-low").textContent = write(scale.low);
  find("scale-high").textContent = write(scale.high);
}

function describeValue(map, x, y) {
  return `${map.label}, row ${y}, column ${x}: ${write(map.values[y * map.width + x])}`;
}

export function drawBars(container, values, onRead = () => {}) {
  // Draw a vector as bars around 0, and show the value under the pointer.
  const scale = makeScale(values);
  const canvas = element("canvas", undefined, { class: "bars", role: "img" });
  canvas.setAttribute("aria-label", `${values.length} values, ${write(scale.low)} to ${write(scale.high)}`);
  container.replaceChildren(canvas);
  fillBars(canvas, values, 160);
  canvas.addEventListener("pointermove", (event) => {
    const [at] = locate(canvas, event, values.length, 1);
    onRead(`entry ${at}: ${write(values[at])}`);
  });
}

function fillBars(canvas, values, height) {
  const low = values.reduce((a, b) => Math.min(a, b), 0);
  const high = values.reduce((a, b) => Math.max(a, b), 0);
  const step = Math.max(1, Math.floor(960 / values.length));
  canvas.width = Math.min(values.length * step, 16384);
  canvas.height = height;
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--mark");
  const zero = high > low ? (high / (high - low)) * height : height;
  values.forEach((value, at) => {
    const top = high > low ? ((high - value) / (high - low)) * height : height;
    context.fillRect(at * step, Math.min(top, zero), Math.max(step - 1, 1), Math.max(Math.abs(top - zero), 1));
  });
}

const place = { map: null, x: 0, y: 0 };

export function zoom(map, scale) {
  // Show one map, large, in its own dialog.
  const title = map.title ?? map.label;
  Object.assign(place, { map, x: 0, y: 0 });
  find("zoom-title").textContent = title;
  paint(find("zoom-canvas"), map, scale);
  find("zoom-canvas").setAttribute("aria-label", `${title}, ${map.height} by ${map.width} values`);
  read(0, 0);
  find("zoom").showModal();
  find("zoom-canvas").focus();
}

function read(x, y) {
  place.x = Math.min(Math.max(x, 0), place.map.width - 1);
  place.y = Math.min(Math.max(y, 0), place.map.height - 1);
  find("zoom-reading").textContent = describeValue(place.map, place.x, place.y);
}

export function installZoom() {
  const canvas = find("zoom-canvas");
  find("zoom-close").addEventListener("click", () => find("zoom").close());
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    read(place.x + STEPS[event.key][0], place.y + STEPS[event.key][1]);
  });
  canvas.addEventListener("pointermove", (event) => read(...locate(canvas, event, place.map.width, place.map.height)));
}
