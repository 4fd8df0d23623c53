// Colour scales with the server's own tables: one for values that are never negative, one around 0 for all others.

import { COMMON, DIVERGING, NOT_FINITE, SEQUENTIAL, STRONGEST } from "./palette.js";

const TABLES = { sequential: SEQUENTIAL, diverging: DIVERGING };
const LAST = SEQUENTIAL.length / 3 - 1;

export function makeScale(values, signed = false) {
  // The scale of some values: {kind, low, high}; around 0 if some are negative, or if they are signed by nature.
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) [low, high] = [0, 0];
  if (low >= 0 && !signed) return { kind: "sequential", low, high };
  const limit = Math.max(-low, high);
  return { kind: "diverging", low: -limit, high: limit };
}

export function makeOverlayScale(values) {
  // The scale of an explanation: from 0, which means no effect; a few outliers do not affect it.
  const sizes = Float64Array.from(values, Math.abs).filter(Number.isFinite).sort();
  const place = COMMON * (sizes.length - 1);
  const [left, right] = [sizes[Math.floor(place)] ?? 0, sizes[Math.ceil(place)] ?? 0];
  const bound = left + (right - left) * (place - Math.floor(place)) || Infinity;
  return makeScale([0, ...[...values].filter(Number.isFinite).map((value) => Math.min(Math.max(value, -bound), bound))]);
}

function findPlace(value, scale) {
  // Position on the scale, 0 to 1; on an empty scale 0, or the middle if it is diverging.
  const width = scale.high - scale.low;
  if (!(width > 0)) return scale.kind === "diverging" ? 0.5 : 0;
  return Math.min(Math.max((value - scale.low) / width, 0), 1);
}

function fill(canvas, map, scale, cover) {
  canvas.width = map.width;
  canvas.height = map.height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(map.width, map.height);
  const table = TABLES[scale.kind];
  map.values.forEach((value, at) => {
    const place = findPlace(value, scale);
    const index = Math.round(place * LAST) * 3;
    const color = Number.isFinite(value) ? table.subarray(index, index + 3) : NOT_FINITE;
    image.data.set(color, at * 4);
    image.data[at * 4 + 3] = cover(value, place);
  });
  context.putImageData(image, 0, 0);
}

export function paint(canvas, map, scale) {
  // Draw {width, height, values} with one pixel per value.
  fill(canvas, map, scale, () => 255);
}

export function paintOverlay(canvas, map, scale) {
  // As paint, but more transparent where the map is low (on a diverging scale: near 0), to cover a picture.
  const strength = (place) => (scale.kind === "diverging" ? Math.abs(place * 2 - 1) : place);
  fill(canvas, map, scale, (value, place) => (Number.isFinite(value) ? Math.round(255 * STRONGEST * strength(place)) : 0));
}

export function paintScale(canvas, scale) {
  const values = Float32Array.from({ length: 256 }, (_, index) => index / 255);
  paint(canvas, { width: 256, height: 1, values }, { ...scale, low: 0, high: 1 });
}

export function write(value) {
  // Format a number with four digits.
  if (!Number.isFinite(value)) return String(value);
  return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
