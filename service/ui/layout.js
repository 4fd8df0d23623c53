// How a tensor of one row is drawn: as maps of channels, as tokens on their grid of patches, as one row of bars.

const MOST_SKIPPED = 16;
const MAPS = {
  NCHW: ([channels, height, width]) => ({ kind: "chw", channels, height, width, skip: 0 }),
  NHWC: ([height, width, channels]) => ({ kind: "hwc", channels, height, width, skip: 0 }),
};

export function describeLayout(shape, layout, grid = { skip: 0 }) {
  // {kind, channels, width, height, skip}. shape is without the row axis; grid is the grid of its tokens, if any.
  if (layout in MAPS && shape.length === 3) return MAPS[layout](shape);
  if (layout === "NTC" && shape.length === 2) return { kind: "hwc", channels: shape[1], height: 1, width: shape[0] - grid.skip, ...grid };
  return { kind: "bars", channels: 1, height: 1, width: shape.reduce((product, size) => product * size, 1), skip: 0 };
}

export function findGrid(tokens, receipt, layers) {
  // The grid of the tokens after the prefix: from their receipt, else that of a layer of maps with as many places.
  // If the model does not give the length of the prefix, try all up to MOST_SKIPPED.
  // Without a grid, only the prefix is known.
  const skip = receipt.prefix_tokens ?? 0;
  const told = receipt.grid_size;
  if (told && told[0] * told[1] === tokens - skip) return { height: told[0], width: told[1], skip };
  for (let guess = skip; guess <= (skip || MOST_SKIPPED); guess += 1) {
    const sides = findPatches(tokens - guess, layers);
    if (sides) return { height: sides[0], width: sides[1], skip: guess };
  }
  return { skip };
}

function findPatches(count, layers) {
  for (const { layout, shape } of layers.flatMap((layer) => layer.outputs)) {
    if (!(layout in MAPS) || shape.length !== 4) continue;
    const { height, width } = MAPS[layout](shape.slice(1));
    if (height * width === count && height > 1 && width > 1) return [height, width];
  }
  return null;
}

export function split(values, layout, channels) {
  // The maps of some channels from a row's values: {width, height, values} for each.
  const size = layout.width * layout.height;
  return Array.from({ length: channels }, (_, channel) => {
    if (layout.kind !== "hwc") return { ...layout, values: values.subarray(channel * size, (channel + 1) * size) };
    const from = layout.skip * channels + channel;
    return { ...layout, values: Float32Array.from({ length: size }, (_, at) => values[from + at * channels]) };
  });
}

export function readLayout(reply, key, layout, side) {
  // The layout of one result of a reply, by its receipt; side has the model's layers.
  const { shape } = reply.features[key];
  if (layout !== "NTC" || shape.length !== 3) return describeLayout(shape.slice(1), layout);
  return describeLayout(shape.slice(1), layout, findGrid(shape[1], reply.receipts[key], side.layers));
}
