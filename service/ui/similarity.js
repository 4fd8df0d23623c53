// How alike two pictures' maps are, in numbers; no page and no server here. A field is {height, width, channels, values}:
// a vector of channels for each place, place by place from left to right and top to bottom.

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
