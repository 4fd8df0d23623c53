// The part of a picture that a model sees: what its resize and its crop in the middle leave of it.
// Where a library's own processor makes the rows that is not known, and taken to be all of it.

function resize(preprocess, width, height) {
  const { resize: size } = preprocess;
  if (size === null) return [width, height];
  if (preprocess.letterbox) {
    const [high, wide = high] = [size].flat();
    if (width * high > wide * height) return [wide, Math.max(roundEven((height / width) * wide), 1)];
    return [Math.max(roundEven((width / height) * high), 1), high];
  }
  if (Array.isArray(size)) return [size[1], size[0]];
  const longer = Math.trunc((size * Math.max(width, height)) / Math.min(width, height));
  return width <= height ? [size, longer] : [longer, size];
}

function roundEven(value) {
  const floor = Math.floor(value);
  return value - floor === 0.5 ? floor + (floor % 2) : Math.round(value);
}

function findStart(preprocess, length, size) {
  // By Pillow's, transformers' and torchvision's roundings; below 0 where the crop goes beyond the picture.
  if (preprocess.letterbox) return -roundEven((size - length) / 2);
  if (preprocess.crop_rounding === "floor") return Math.floor((length - size) / 2);
  return size > length ? -Math.floor((size - length) / 2) : roundEven((length - size) / 2);
}

export function findSeen(preprocess, width, height) {
  // Left, top, width and height, as shares of the picture.
  const window = preprocess?.letterbox ? preprocess.resize : (preprocess?.crop ?? null);
  if (window === null) return [0, 0, 1, 1];
  const [wide, high] = resize(preprocess, width, height);
  const [seenHigh, seenWide = seenHigh] = [window].flat();
  const [left, top] = [findStart(preprocess, wide, seenWide), findStart(preprocess, high, seenHigh)];
  return [left / wide, top / high, seenWide / wide, seenHigh / high];
}

export function fit(element, seen) {
  // An element in the frame of a picture, over what the model sees of it.
  ["left", "top", "width", "height"].forEach((side, at) => {
    element.style[side] = `${seen[at] * 100}%`;
  });
}
