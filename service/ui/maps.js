// What of a layer is drawn: arrays become channels of maps, or one row of bars; tiles of them, and one of them large.

import { makeScale, paint, paintScale, write } from "./colors.js";

const PREFIXES = 16; // of tokens before those of patches, at most

export function find(id) {
  return document.getElementById(id);
}

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function describeLayout(shape, layout) {
  // How one row's tensor of this shape is drawn: {kind, channels, width, height, skip}; shape is without the axis of rows.
  const [first, second, third] = shape;
  if (layout === "NCHW" && shape.length === 3) return { kind: "chw", channels: first, height: second, width: third, skip: 0 };
  if (layout === "NHWC" && shape.length === 3) return { kind: "hwc", channels: third, height: first, width: second, skip: 0 };
  if (layout === "NTC" && shape.length === 2) {
    for (let skip = 0; skip <= PREFIXES && skip < first; skip += 1) {
      const side = Math.sqrt(first - skip);
      if (Number.isInteger(side) && side > 1) return { kind: "hwc", channels: second, height: side, width: side, skip };
    }
    return { kind: "hwc", channels: second, height: 1, width: first, skip: 0 };
  }
  const count = shape.reduce((product, size) => product * size, 1);
  return { kind: "bars", channels: 1, height: 1, width: count, skip: 0 };
}

export function split(values, layout, channels) {
  // The maps of some channels out of a row's values: {width, height, values} for each.
  const size = layout.width * layout.height;
  return Array.from({ length: channels }, (_, channel) => {
    if (layout.kind !== "hwc") return { ...layout, values: values.subarray(channel * size, (channel + 1) * size) };
    const from = layout.skip * channels + channel;
    return { ...layout, values: Float32Array.from({ length: size }, (_, at) => values[from + at * channels]) };
  });
}

export function drawTiles(container, maps, each, onZoom, onRead) {
  // A button for each map, on one scale or each on its own; says which scale that is.
  const common = makeScale(concatenate(maps));
  container.replaceChildren();
  maps.forEach((map) => {
    const scale = each ? makeScale(map.values) : common;
    const tile = element("button", undefined, { type: "button", class: "tile", "data-channel": map.channel });
    const canvas = element("canvas");
    paint(canvas, map, scale);
    tile.append(canvas, element("span", String(map.channel)));
    tile.setAttribute("aria-label", `${map.word ?? "channel"} ${map.channel}, ${write(scale.low)} to ${write(scale.high)}: enlarge`);
    tile.addEventListener("click", () => onZoom(map, scale));
    canvas.addEventListener("pointermove", (event) => onRead(readAt(canvas, map, event)));
    canvas.addEventListener("pointerleave", () => onRead(""));
    container.append(tile);
  });
  showScale(each ? null : common);
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

function showScale(scale) {
  find("scale").hidden = !scale;
  if (!scale) return;
  paintScale(find("scale-bar"), scale);
  find("scale-low").textContent = write(scale.low);
  find("scale-high").textContent = write(scale.high);
}

function readAt(canvas, map, event) {
  const box = canvas.getBoundingClientRect();
  const x = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * map.width), 0), map.width - 1);
  const y = Math.min(Math.max(Math.floor(((event.clientY - box.top) / box.height) * map.height), 0), map.height - 1);
  return describeValue(map, x, y);
}

function describeValue(map, x, y) {
  return `${map.word ?? "channel"} ${map.channel}, row ${y}, column ${x}: ${write(map.values[y * map.width + x])}`;
}

export function drawBars(container, values, onRead) {
  // A vector as bars around 0; the value under the pointer is read.
  const scale = makeScale(values);
  const canvas = element("canvas", undefined, { class: "bars", role: "img" });
  canvas.setAttribute("aria-label", `${values.length} values, ${write(scale.low)} to ${write(scale.high)}`);
  fillBars(canvas, values, 160);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * values.length), 0), values.length - 1);
    onRead(`entry ${at}: ${write(values[at])}`);
  });
  container.replaceChildren(canvas);
  showScale(null);
}

export function fillBars(canvas, values, height) {
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

export function zoom(map, scale, title) {
  // One channel, large, in a dialog of its own.
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

const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export function installZoom() {
  const canvas = find("zoom-canvas");
  find("zoom-close").addEventListener("click", () => find("zoom").close());
  canvas.addEventListener("keydown", (event) => {
    if (!(event.key in STEPS)) return;
    event.preventDefault();
    read(place.x + STEPS[event.key][0], place.y + STEPS[event.key][1]);
  });
  canvas.addEventListener("pointermove", (event) => {
    find("zoom-reading").textContent = readAt(canvas, place.map, event);
  });
}
