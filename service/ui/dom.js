// Elements of the page: found by id, created with text that is never parsed as HTML.

export function find(id) {
  return document.getElementById(id);
}

export function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function locate(box, event, width, height) {
  // The cell under the pointer, if an element is divided into width by height cells.
  const { left, top, width: wide, height: high } = box.getBoundingClientRect();
  const within = (place, size) => Math.min(Math.max(Math.floor(place * size), 0), size - 1);
  return [within((event.clientX - left) / wide, width), within((event.clientY - top) / high, height)];
}

export const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
