// The part of a picture that a model sees after its resize and centre crop.
// For a library's own image processor that is unknown, and assumed to be the whole picture.

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
  // With the rounding of Pillow, transformers and torchvision; negative if the crop extends beyond the picture.
  if (preprocess.letterbox) return -roundEven((size - length) / 2);
  if (preprocess.crop_rounding === "floor") return Math.floor((length - size) / 2);
  return size > length ? -Math.floor((size - length) / 2) : roundEven((length - size) / 2);
}

export function findSeen(preprocess, width, height) {
  // Left, top, width and height, as fractions of the picture.
  const window = preprocess?.letterbox ? preprocess.resize : (preprocess?.crop ?? null);
  if (window === null) return [0, 0, 1, 1];
  const [wide, high] = resize(preprocess, width, height);
  const [seenHigh, seenWide = seenHigh] = [window].flat();
  const [left, top] = [findStart(preprocess, wide, seenWide), findStart(preprocess, high, seenHigh)];
  return [left / wide, top / high, seenWide / wide, seenHigh / high];
}

export function fit(element, seen) {
  // Place an element in a picture's frame, over the part that the model sees.
  ["left", "top", "width", "height"].forEach((side, at) => {
    element.style[side] = `${seen[at] * 100}%`;
  });
}
