// The part of a picture that a model sees: what its resize and its crop in the middle leave of it.

function resize(preprocess, width, height) {
  const { resize: size } = preprocess;
  if (size === null) return [width, height];
  if (Array.isArray(size)) return [size[1], size[0]];
  const longer = Math.trunc((size * Math.max(width, height)) / Math.min(width, height));
  return width <= height ? [size, longer] : [longer, size];
}

function findStart(length, size) {
  // By torchvision's roundings, halves to even numbers; below 0 where the crop goes beyond the picture.
  if (size > length) return -Math.floor((size - length) / 2);
  const half = (length - size) / 2;
  const floor = Math.floor(half);
  return half - floor === 0.5 ? floor + (floor % 2) : Math.round(half);
}

export function findSeen(preprocess, width, height) {
  // Left, top, width and height, as shares of the picture.
  if (!preprocess || preprocess.crop === null) return [0, 0, 1, 1];
  const [wide, high] = resize(preprocess, width, height);
  const [cropHigh, cropWide = cropHigh] = [preprocess.crop].flat();
  return [findStart(wide, cropWide) / wide, findStart(high, cropHigh) / high, cropWide / wide, cropHigh / high];
}

export function fit(element, seen) {
  // An element in the frame of a picture, over what the model sees of it.
  ["left", "top", "width", "height"].forEach((side, at) => {
    element.style[side] = `${seen[at] * 100}%`;
  });
}
