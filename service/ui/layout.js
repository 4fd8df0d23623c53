// How a tensor of one row is drawn: as maps of channels, as tokens over their grid of patches, as one row of bars.

const MOST_SKIPPED = 16;
const MAPS = {
  NCHW: ([channels, height, width]) => ({ kind: "chw", channels, height, width, skip: 0 }),
  NHWC: ([height, width, channels]) => ({ kind: "hwc", channels, height, width, skip: 0 }),
};

export function describeLayout(shape, layout, grid = { skip: 0 }) {
  // {kind, channels, width, height, skip}. shape is without the axis of rows; grid is where its tokens stand, if they do.
  if (layout in MAPS && shape.length === 3) return MAPS[layout](shape);
  if (layout === "NTC" && shape.length === 2) return { kind: "hwc", channels: shape[1], height: 1, width: shape[0] - grid.skip, ...grid };
  return { kind: "bars", channels: 1, height: 1, width: shape.reduce((product, size) => product * size, 1), skip: 0 };
}

export function findGrid(tokens, receipt, layers, input) {
  // Where the tokens behind those of the prefix stand: as their receipt tells it, else in the grid of the layer of maps
  // that they were made of, else in the one whose patches are nearest to squares of the model's input. Of a model that
  // does not tell how many stand in front, as many as such a layer leaves over. Without a grid their number is all.
  const skip = receipt.prefix_tokens ?? 0;
  const told = receipt.grid_size;
  if (told && told[0] * told[1] === tokens - skip) return { height: told[0], width: told[1], skip };
  for (let guess = skip; guess <= (skip || MOST_SKIPPED); guess += 1) {
    const sides = findPatches(tokens - guess, layers);
    if (sides) return { height: sides[0], width: sides[1], skip: guess };
  }
  const sides = divide(tokens - skip, input);
  return sides ? { height: sides[0], width: sides[1], skip } : { skip };
}

function findPatches(count, layers) {
  for (const { layout, shape } of layers.flatMap((layer) => layer.outputs)) {
    if (!(layout in MAPS) || shape.length !== 4) continue;
    const { height, width } = MAPS[layout](shape.slice(1));
    if (height * width === count && height > 1 && width > 1) return [height, width];
  }
  return null;
}

function divide(count, input) {
  const [high, wide] = input?.shape.length === 3 ? input.shape.slice(input.shape[2] <= 4 ? 0 : 1) : [1, 1];
  const stretch = (height) => Math.abs(Math.log((height * height * wide) / (count * high))); // 0 where patches are squares
  const heights = Array.from({ length: count }, (_, at) => at + 1).filter((height) => count % height === 0 && height > 1 && height < count);
  heights.sort((a, b) => stretch(a) - stretch(b));
  return heights.length && stretch(heights[0]) < 0.1 ? [heights[0], count / heights[0]] : null;
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

export function readLayout(reply, key, layout, side) {
  // That of one result of a reply, by what its receipt says of tokens; side has the model's layers and its entry.
  const { shape } = reply.features[key];
  if (layout !== "NTC" || shape.length !== 3) return describeLayout(shape.slice(1), layout);
  return describeLayout(shape.slice(1), layout, findGrid(shape[1], reply.receipts[key], side.layers, side.entry?.inputs[0]));
}
