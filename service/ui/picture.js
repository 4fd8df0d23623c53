// The user's pictures: dropped, pasted, picked, or a sample; each place of the page that takes one registers here.

import { encode, load, ProblemError } from "./api.js";
import { element } from "./dom.js";

export const SAMPLES = { "digit-2": "A two", "digit-0": "A zero", shapes: "Shapes" };
const places = []; // {area, take}, take(give, name, sample), where give() returns the file or its promise; pictures dropped or pasted elsewhere go to the first place

async function readPicture(blob, name, sample, limits) {
  // {name, sample, type, data, url, width, height}: base64 data, and a URL that is only valid in this page.
  refuseLarge(blob.size, limits.max_body_bytes);
  const bytes = new Uint8Array(await read(blob));
  const url = URL.createObjectURL(blob);
  return { name, sample, type: blob.type, data: encode(bytes), url, ...(await measure(url)) };
}

async function read(blob) {
  try {
    return await blob.arrayBuffer();
  } catch {
    throw new ProblemError(null, "The file can't be read.", "Is it a folder, or no longer there?");
  }
}

async function measure(url) {
  // The size of the upright picture, 0 if the browser can't show it (the server may still be able to decode it).
  const image = new Image();
  image.src = url;
  try {
    await image.decode();
    return { width: image.naturalWidth, height: image.naturalHeight };
  } catch {
    return { width: 0, height: 0 };
  }
}

function refuseLarge(size, limit) {
  if (!limit || size * 1.34 < limit) return;
  const most = (limit / 1.34 / 2 ** 20).toFixed(1);
  throw new ProblemError(413, `The file has ${(size / 2 ** 20).toFixed(1)} MiB; this server takes about ${most} MiB.`, "choose a smaller picture", 0);
}

export async function readLast(side, give, name, sample, limits) {
  // As readPicture, for the picture that is given; null if the side has got another one meanwhile.
  const given = Symbol(name);
  side.given = given;
  const picture = await readPicture(await give(), name, sample, limits);
  if (side.given === given) return picture;
  URL.revokeObjectURL(picture.url);
  return null;
}

export function takeSample(name, take) {
  take(() => load(`ui/${name}.png`), `${name}.png`, name);
}

function choosePlace(node) {
  return places.find((each) => each.area.contains(node)) ?? places[0];
}

export function installPictures() {
  const mark = (place) => {
    for (const each of places) each.area.classList.toggle("over", each === place);
  };
  for (const kind of ["dragover", "dragenter"]) {
    document.addEventListener(kind, (event) => {
      event.preventDefault();
      mark(choosePlace(event.target));
    });
  }
  document.addEventListener("dragleave", () => mark(null));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    mark(null);
    const file = event.dataTransfer?.files[0];
    if (file) choosePlace(event.target).take(() => file, file.name);
  });
  document.addEventListener("paste", (event) => {
    const file = event.clipboardData?.files[0];
    if (file) choosePlace(event.target).take(() => file, file.name || "pasted");
  });
}

export function addPlace({ area, pick, file, samples }, take) {
  // Register a place for pictures: an area to drop on, a button and its file input, a group for sample buttons.
  places.push({ area, take });
  pick.addEventListener("click", () => file.click());
  file.addEventListener("change", () => {
    const [chosen] = file.files;
    if (chosen) take(() => chosen, chosen.name);
    file.value = "";
  });
  for (const [name, title] of Object.entries(SAMPLES)) {
    const button = element("button", undefined, { type: "button", "aria-label": `Sample: ${title}`, "data-sample": name });
    button.append(element("img", undefined, { src: `ui/${name}.png`, alt: "" }));
    button.addEventListener("click", () => takeSample(name, take));
    samples.append(button);
  }
}
