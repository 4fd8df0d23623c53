// How alike two layers' maps are, in numbers; no page and no server here. A field is {height, width, channels, values}:
// a vector of channels for each place, place by place from left to right and top to bottom.

const MOST = 16; // places a side that two fields are compared on

export function makeField(values, { kind, channels, height, width, skip }) {
  // A row's values, channels first or last, as a field; a vector is one of a single place.
  if (kind === "bars") return { height: 1, width: 1, channels: values.length, values };
  if (kind === "hwc") return { height, width, channels, values: values.subarray(skip * channels) };
  const moved = new Float32Array(values.length);
  const places = height * width;
  for (let channel = 0; channel < channels; channel += 1) {
    for (let place = 0; place < places; place += 1) moved[place * channels + channel] = values[channel * places + place];
  }
  return { height, width, channels, values: moved };
}

export function average({ channels, values }) {
  // The mean vector of all places.
  const sum = new Float64Array(channels);
  values.forEach((value, at) => {
    sum[at % channels] += value;
  });
  return sum.map((each) => (each * channels) / values.length);
}

export function findCosine(a, b) {
  // The cosine of the angle between two vectors; NaN where one is all zeros.
  let [both, ofA, ofB] = [0, 0, 0];
  for (let at = 0; at < a.length; at += 1) {
    both += a[at] * b[at];
    ofA += a[at] * a[at];
    ofB += b[at] * b[at];
  }
  return both / Math.sqrt(ofA * ofB);
}

export function findCosines(vector, { channels, values }) {
  // The cosine of a vector to that of each place.
  return Float32Array.from({ length: values.length / channels }, (_, place) => findCosine(vector, values.subarray(place * channels, (place + 1) * channels)));
}

export function findShared(a, b, seenA, seenB) {
  // Of two fields over parts of one picture (left, top, width, height of it): the grid that both are brought to, no finer
  // than either, and the part of each that both have, from and to in places down and across. Null where there is none.
  const [left, top] = [0, 1].map((axis) => Math.max(seenA[axis], seenB[axis]));
  const [right, bottom] = [0, 1].map((axis) => Math.min(seenA[axis] + seenA[axis + 2], seenB[axis] + seenB[axis + 2]));
  if (right <= left || bottom <= top) return null;
  const boxes = [[a, seenA], [b, seenB]].map(([field, [x, y, width, height]]) => ({
    down: [((top - y) / height) * field.height, ((bottom - y) / height) * field.height],
    across: [((left - x) / width) * field.width, ((right - x) / width) * field.width],
  }));
  const count = (axis) => Math.max(1, Math.min(MOST, ...boxes.map((box) => Math.floor(box[axis][1] - box[axis][0] + 1e-6))));
  return { rows: count("down"), columns: count("across"), boxes };
}

function weigh(size, cells, [from, to]) {
  // How much each of size places counts in each of so many cells between from and to: what they overlap.
  const step = (to - from) / cells;
  return Array.from({ length: cells }, (_, cell) => {
    const [low, high] = [from + cell * step, from + (cell + 1) * step];
    return Float64Array.from({ length: size }, (__, place) => Math.max(Math.min(high, place + 1) - Math.max(low, place), 0) / step);
  });
}

export function resample({ height, width, channels, values }, rows, columns, { down, across }) {
  // A field's means over the cells of a grid: (rows × columns, channels).
  const [ofRows, ofColumns] = [weigh(height, rows, down), weigh(width, columns, across)];
  const result = new Float64Array(rows * columns * channels);
  ofRows.forEach((weightsDown, row) => weightsDown.forEach((weightDown, y) => {
    if (!weightDown) return;
    ofColumns.forEach((weightsAcross, column) => weightsAcross.forEach((weightAcross, x) => {
      if (!weightAcross) return;
      const [to, from] = [(row * columns + column) * channels, (y * width + x) * channels];
      for (let channel = 0; channel < channels; channel += 1) result[to + channel] += weightDown * weightAcross * values[from + channel];
    }));
  }));
  return result;
}

function multiply(points, count) {
  // The products of all points with each other, once the mean point is taken off: (count, count).
  const channels = points.length / count;
  const centred = Float64Array.from(points);
  for (let channel = 0; channel < channels; channel += 1) {
    let mean = 0;
    for (let at = channel; at < points.length; at += channels) mean += points[at] / count;
    for (let at = channel; at < points.length; at += channels) centred[at] -= mean;
  }
  const products = new Float64Array(count * count);
  for (let i = 0; i < count; i += 1) {
    for (let j = i; j < count; j += 1) {
      let sum = 0;
      for (let channel = 0; channel < channels; channel += 1) sum += centred[i * channels + channel] * centred[j * channels + channel];
      products[i * count + j] = products[j * count + i] = sum;
    }
  }
  return products;
}

function alignProducts(a, b) {
  let sum = 0;
  for (let at = 0; at < a.length; at += 1) sum += a[at] * b[at];
  return sum;
}

function alignWithoutBias(a, b, count) {
  // The unbiased estimate of the same, up to a factor: Song et al., "Feature selection via dependence maximization", 2012.
  const sums = [a, b].map((products) => {
    const rows = new Float64Array(count);
    products.forEach((value, at) => {
      if (at % (count + 1) !== 0) rows[Math.floor(at / count)] += value;
    });
    return rows;
  });
  const [totalA, totalB] = sums.map((rows) => rows.reduce((one, other) => one + other, 0));
  let inner = 0;
  for (let at = 0; at < a.length; at += 1) if (at % (count + 1) !== 0) inner += a[at] * b[at];
  return inner + (totalA * totalB) / ((count - 1) * (count - 2)) - (2 * alignProducts(...sums)) / (count - 2);
}

export function findAlignment(x, y, count) {
  // Linear CKA of the same places in two layers (Kornblith et al., "Similarity of neural network representations
  // revisited", 2019), and the same of unbiased estimates (Nguyen et al., "Do wide and deep networks learn the same
  // things?", 2021), NaN of less than four places.
  const [k, l] = [multiply(x, count), multiply(y, count)];
  const share = (align) => align(k, l) / Math.sqrt(align(k, k) * align(l, l));
  return { cka: share(alignProducts), debiased: count > 3 ? share((a, b) => alignWithoutBias(a, b, count)) : NaN };
}
