// Colours of numbers: one scale for what is never below 0, one around 0 for the rest. Lightness rises along the
// first, and falls to both sides of the middle of the second, so that both can be read without seeing hues.

const SEQUENTIAL = [[16, 20, 48], [34, 58, 112], [30, 106, 136], [52, 150, 130], [126, 188, 108], [216, 216, 112], [252, 244, 200]];
const DIVERGING = [[20, 62, 120], [72, 132, 186], [166, 202, 226], [244, 242, 238], [240, 190, 148], [206, 106, 62], [130, 44, 24]];

function makeTable(anchors) {
  const table = new Uint8ClampedArray(256 * 3);
  for (let index = 0; index < 256; index += 1) {
    const place = (index / 255) * (anchors.length - 1);
    const left = Math.min(Math.floor(place), anchors.length - 2);
    for (let part = 0; part < 3; part += 1) {
      const [from, to] = [anchors[left][part], anchors[left + 1][part]];
      table[index * 3 + part] = Math.round(from + (to - from) * (place - left));
    }
  }
  return table;
}

const TABLES = { sequential: makeTable(SEQUENTIAL), diverging: makeTable(DIVERGING) };

export function makeScale(values) {
  // The scale of some numbers: {kind, low, high}; numbers that are not finite have no say.
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (!Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return { kind: "sequential", low: 0, high: 0 };
  if (low >= 0) return { kind: "sequential", low, high };
  const limit = Math.max(-low, high);
  return { kind: "diverging", low: -limit, high: limit };
}

export function paint(canvas, map, scale) {
  // Draw {width, height, values} with a pixel for each value; what is not finite stays transparent.
  canvas.width = map.width;
  canvas.height = map.height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(map.width, map.height);
  const table = TABLES[scale.kind];
  const width = scale.high - scale.low;
  map.values.forEach((value, at) => {
    if (!Number.isFinite(value)) return;
    const share = width > 0 ? (value - scale.low) / width : 0;
    const index = Math.round(Math.min(Math.max(share, 0), 1) * 255) * 3;
    image.data.set([table[index], table[index + 1], table[index + 2], 255], at * 4);
  });
  context.putImageData(image, 0, 0);
}

export function paintOverlay(canvas, map, scale) {
  // The same, more transparent where the map is small, to lie over a picture.
  paint(canvas, map, scale);
  const context = canvas.getContext("2d");
  const image = context.getImageData(0, 0, map.width, map.height);
  map.values.forEach((value, at) => {
    image.data[at * 4 + 3] = scale.high > 0 ? Math.round(215 * Math.min(Math.max(value / scale.high, 0), 1)) : 0;
  });
  context.putImageData(image, 0, 0);
}

export function paintScale(canvas, scale) {
  const values = Float32Array.from({ length: 256 }, (_, index) => scale.low + ((scale.high - scale.low) * index) / 255);
  paint(canvas, { width: 256, height: 1, values }, scale.high > scale.low ? scale : { ...scale, high: scale.low + 1 });
}

export function write(value) {
  // A number for people, of four digits.
  if (!Number.isFinite(value)) return String(value);
  return Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}
