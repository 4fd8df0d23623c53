// Two pictures side by side, and the similarity of each place of one to the place under the pointer in the other.

import { paintOverlay, write } from "./colors.js";
import { element, find, locate, STEPS } from "./dom.js";
import { fit } from "./seen.js";
import { findCosines } from "./similarity.js";

let shown = null; // {frames, fields, at}: the selected place in each, [x, y]

export function showPlaces(frames, sides, matched) {
  // Show the pictures; if their vectors are comparable, also the similarity to the middle of the first.
  shown = matched ? { frames, fields: sides.map((side) => side.field), at: [] } : null;
  frames.forEach((frame, number) => {
    const { picture, seen, field, layer } = sides[number];
    const image = frame.querySelector("img");
    image.hidden = !picture.width;
    if (picture.width && image.src !== picture.url) image.src = picture.url;
    frame.querySelector(".frame").classList.remove("covered");
    frame.querySelector(".frame").hidden = !picture.width && !matched;
    fit(frame.querySelector(".seen"), picture.width ? seen : [0, 0, 1, 1]);
    frame.querySelector(".place").hidden = true;
    const canvas = frame.querySelector(".seen canvas");
    canvas.hidden = !matched;
    canvas.setAttribute("aria-label", `${picture.name}: ${field.height} by ${field.width} places of ${layer}. Arrow keys choose one.`);
  });
  find("match-reading").textContent = "";
  if (shown) point(0, ...middle(shown.fields[0]));
}

function middle({ width, height }) {
  return [Math.floor(width / 2), Math.floor(height / 2)];
}

function point(number, x, y) {
  // Mark a place of one picture, and draw the similarity of the other's places to it.
  const { frames, fields } = shown;
  const [here, there] = [fields[number], fields[1 - number]];
  shown.at = [];
  shown.at[number] = [x, y];
  const from = (y * here.width + x) * here.channels;
  const cosines = findCosines(here.values.subarray(from, from + here.channels), there);
  mark(frames[number], here, x, y);
  cover(frames[1 - number], there, cosines);
  find("match-reading").textContent = describe(number, [x, y], there, cosines);
}

function mark(frame, field, x, y) {
  const place = frame.querySelector(".place");
  place.hidden = false;
  place.style.left = `${((x + 0.5) / field.width) * 100}%`;
  place.style.top = `${((y + 0.5) / field.height) * 100}%`;
  place.style.width = `${100 / field.width}%`;
  place.style.height = `${100 / field.height}%`;
  frame.querySelector(".frame").classList.remove("covered");
  clear(frame.querySelector(".seen canvas"), field);
}

function clear(canvas, { width, height }) {
  [canvas.width, canvas.height] = [width, height];
}

function cover(frame, { width, height }, cosines) {
  const finite = cosines.filter(Number.isFinite);
  const scale = { kind: "sequential", low: finite.reduce((a, b) => Math.min(a, b), 1), high: finite.reduce((a, b) => Math.max(a, b), -1) };
  frame.querySelector(".place").hidden = true;
  frame.querySelector(".frame").classList.add("covered");
  paintOverlay(frame.querySelector(".seen canvas"), { width, height, values: cosines }, scale);
}

function describe(number, [x, y], there, cosines) {
  const best = cosines.reduce((at, value, place) => (value > cosines[at] || Number.isNaN(cosines[at]) ? place : at), 0);
  const low = cosines.reduce((a, b) => (b < a || Number.isNaN(a) ? b : a), NaN);
  const start = `Row ${y}, column ${x} of the ${["first", "second"][number]}`;
  if (Number.isNaN(cosines[best])) return `${start} is like no place: its vector is zero.`;
  const [row, column] = [Math.floor(best / there.width), best % there.width];
  return `${start} is most like row ${row}, column ${column} of the ${["second", "first"][number]}: cosine ${write(cosines[best])}, the least ${write(low)}.`;
}

export function installPlaces(frames) {
  frames.forEach((frame, number) => {
    const seen = frame.querySelector(".seen");
    const canvas = seen.appendChild(element("canvas", undefined, { tabindex: "0", role: "img", "aria-describedby": "match-reading" }));
    canvas.addEventListener("pointermove", (event) => {
      if (!shown) return;
      const { width, height } = shown.fields[number];
      const place = locate(canvas, event, width, height);
      if (String(place) !== String(shown.at[number])) point(number, ...place);
    });
    canvas.addEventListener("keydown", (event) => {
      if (!shown || !(event.key in STEPS)) return;
      event.preventDefault();
      const field = shown.fields[number];
      const [x, y] = shown.at[number] ?? middle(field);
      const [stepX, stepY] = STEPS[event.key];
      point(number, Math.min(Math.max(x + stepX, 0), field.width - 1), Math.min(Math.max(y + stepY, 0), field.height - 1));
    });
  });
}
