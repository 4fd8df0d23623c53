// Maps of what speaks for an answer, over the picture as it is preprocessed.

import { ask, decode } from "./api.js";
import { makeScale, paintOverlay } from "./colors.js";
import { find } from "./maps.js";
import { makeObjective } from "./view.js";

const WITHOUT_OBJECTIVE = new Set(["attention_rollout"]);

export async function showExplanation(state, signal) {
  const canvas = find("overlay");
  if (state.method || state.site !== "attention") canvas.hidden = true;
  find("method-note").textContent = "";
  if (!state.method || !state.picture) return;
  const body = { model: state.model, inputs: [{ image: state.picture.data }], method: state.method, encoding: "base64" };
  if (!WITHOUT_OBJECTIVE.has(state.method)) body.objective = makeObjective(state);
  const reply = await ask("explain", body, signal);
  const { shape, values } = decode(reply.features[state.method]);
  const map = { height: shape[1], width: shape[2], values };
  paintOverlay(canvas, map, makeScale(values));
  fit(canvas, state);
  canvas.hidden = find("picture").hidden;
  const receipt = reply.receipts[state.method];
  const name = receipt.labels?.[0] ?? receipt.classes?.[0];
  const of = name === undefined ? "" : `, class ${name}`;
  find("method-note").textContent = [`${shape[1]} by ${shape[2]} values${of}`, ...(reply.warnings ?? [])].join(". ");
}

export function fit(canvas, state) {
  // Where the model resized the short side and cut out the middle, the map lies over that part alone.
  const image = find("picture");
  const [width, height] = [image.naturalWidth || 1, image.naturalHeight || 1];
  const preprocess = state.models.find((each) => each.name === state.model)?.preprocess;
  let [shareX, shareY] = [1, 1];
  if (preprocess && preprocess.crop !== null) {
    const [cropY, cropX] = [preprocess.crop].flat().length === 2 ? preprocess.crop : [preprocess.crop, preprocess.crop];
    const short = Math.min(width, height);
    const resized = Array.isArray(preprocess.resize) ? preprocess.resize : [(height / short) * preprocess.resize, (width / short) * preprocess.resize];
    const [fullY, fullX] = preprocess.resize === null ? [height, width] : resized;
    [shareX, shareY] = [Math.min(cropX / fullX, 1), Math.min(cropY / fullY, 1)];
  }
  canvas.style.width = `${shareX * 100}%`;
  canvas.style.height = `${shareY * 100}%`;
  canvas.style.left = `${((1 - shareX) / 2) * 100}%`;
  canvas.style.top = `${((1 - shareY) / 2) * 100}%`;
}

export function installExplain(state, explain, showGradient) {
  find("method").addEventListener("change", (event) => {
    state.method = event.target.value;
    explain();
  });
  find("class").addEventListener("change", (event) => {
    state.class = event.target.value;
    explain();
    showGradient();
  });
}
