// The similarity of two pictures' maps; uses neither page nor server. A field is {height, width, channels, values}:
// a vector of channels for each place, in row-major order.

export function makeField(values, { kind, channels, height, width, skip }) {
  // Convert a row's values, channels first or last, to a field; a vector is a field with one place.
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
  // The mean vector over all places.
  const sum = new Float64Array(channels);
  values.forEach((value, at) => {
    sum[at % channels] += value;
  });
  return sum.map((each) => (each * channels) / values.length);
}

export function findCosine(a, b) {
  // The cosine similarity of two vectors; NaN if one is all zeros.
  let [both, ofA, ofB] = [0, 0, 0];
  for (let at = 0; at < a.length; at += 1) {
    both += a[at] * b[at];
    ofA += a[at] * a[at];
    ofB += b[at] * b[at];
  }
  return both / Math.sqrt(ofA * ofB);
}

export function findCosines(vector, { channels, values }) {
  // The cosine similarity of a vector to that of each place.
  return Float32Array.from({ length: values.length / channels }, (_, place) => findCosine(vector, values.subarray(place * channels, (place + 1) * channels)));
}
