// Maps that explain an answer, each over the preprocessed picture; several methods side by side.

import { ask, decode } from "./api.js";
import { findScores, nameClass } from "./classes.js";
import { makeOverlayScale, paint, paintOverlay } from "./colors.js";
import { element, find } from "./dom.js";
import { zoom } from "./maps.js";
import { makeObjective } from "./requests.js";
import { fit } from "./seen.js";

const hasMaps = ({ layers }) => layers.some((layer) => ["NCHW", "NHWC", "NTC"].includes(layer.layout) && layer.outputs.length);
const hasRelu = ({ layers }) => layers.some((layer) => layer.type === "ReLU" && layer.calls);
const hasOneInput = ({ entry }) => entry?.inputs.length === 1;
const hasAttention = ({ layers }) => {
  const shapes = layers.flatMap((layer) => layer.attention).map((each) => each.shape);
  return shapes.length > 0 && shapes.every(([rows, , queries, keys]) => rows === 1 && queries === keys && keys === shapes[0][3]);
};

// What a model needs for each method.
const METHODS = {
  grad_cam: { title: "Grad-CAM", fits: hasMaps },
  grad_cam_plusplus: { title: "Grad-CAM++", fits: hasMaps },
  hires_cam: { title: "HiResCAM", fits: hasMaps },
  layer_cam: { title: "LayerCAM", fits: hasMaps },
  xgrad_cam: { title: "XGrad-CAM", fits: hasMaps },
  eigen_cam: { title: "EigenCAM", fits: hasMaps, answerless: true },
  ablation_cam: { title: "Ablation-CAM", fits: (state) => hasMaps(state) && hasOneInput(state) },
  score_cam: { title: "Score-CAM", fits: (state) => hasMaps(state) && hasOneInput(state) },
  saliency: { title: "Saliency", fits: () => true },
  guided_backpropagation: { title: "Guided backprop", fits: hasRelu },
  integrated_gradients: { title: "Integrated gradients", fits: hasOneInput },
  smoothgrad: { title: "SmoothGrad", fits: hasOneInput },
  occlusion: { title: "Occlusion", fits: hasOneInput },
  attention_rollout: { title: "Attention rollout", fits: hasAttention, answerless: true },
  gradient_rollout: { title: "Gradient rollout", fits: hasAttention },
  relevance: { title: "Relevance", fits: hasAttention },
};

function listMethods(state) {
  // The methods that the model supports.
  const scores = findScores(state);
  return Object.keys(METHODS).filter((name) => METHODS[name].fits(state) && (scores || METHODS[name].answerless));
}

export function showMethods(state, onToggle) {
  const offered = listMethods(state);
  state.methods = state.methods.filter((name) => offered.includes(name));
  const buttons = offered.map((name) => {
    const button = element("button", METHODS[name].title, { type: "button", "aria-pressed": String(state.methods.includes(name)), "data-method": name });
    button.addEventListener("click", () => onToggle(name));
    return button;
  });
  find("methods").replaceChildren(...buttons);
  find("lens").hidden = !offered.length;
}

export function markMethods(state) {
  for (const button of find("methods").children) button.setAttribute("aria-pressed", String(state.methods.includes(button.dataset.method)));
  for (const figure of [...find("explanations").children]) if (!state.methods.includes(figure.dataset.method)) figure.remove();
}

export function forgetExplanations() {
  find("explanations").replaceChildren();
}

function makeFigure(state, name) {
  // The picture, before its map arrives: replaces the method's figure, or is added after the others.
  const figure = element("figure", undefined, { "data-method": name, class: "busy" });
  const frame = element("button", undefined, { type: "button", class: "frame", "aria-label": `${METHODS[name].title}: enlarge` });
  if (state.picture.width) frame.append(element("img", undefined, { src: state.picture.url, alt: "" }));
  const canvas = element("canvas");
  frame.append(canvas);
  fit(canvas, state.picture.width ? state.seen : [0, 0, 1, 1]);
  frame.disabled = true;
  const caption = element("figcaption");
  caption.append(element("span", METHODS[name].title, { class: "name" }), element("span", "Asking …", { class: "quiet" }));
  figure.append(frame, caption);
  const old = [...find("explanations").children].find((each) => each.dataset.method === name);
  if (old) old.replaceWith(figure);
  else find("explanations").append(figure);
  return { figure, frame, canvas, note: caption.lastChild };
}

export async function showExplanation(state, name, signal) {
  const { figure, frame, canvas, note } = makeFigure(state, name);
  const body = { model: state.model, inputs: [{ image: state.picture.data }], method: name, encoding: "base64" };
  if (!METHODS[name].answerless) body.objective = makeObjective(state);
  let reply;
  try {
    reply = await ask("explain", body, signal);
  } catch (error) {
    note.textContent = [422, 429].includes(error.status) ? error.message : "No answer";
    if (error.status === 422) return; // the model does not support it, which is not a problem
    throw error;
  } finally {
    figure.classList.remove("busy");
  }
  const map = { ...readMap(decode(reply.features[name])), label: METHODS[name].title };
  const scale = makeOverlayScale(map.values);
  (state.picture.width ? paintOverlay : paint)(canvas, map, scale);
  frame.disabled = false;
  frame.addEventListener("click", () => zoom(map, scale));
  note.textContent = describe(state, reply, name, map);
}

function readMap({ shape, values }) {
  // The map; channels are summed.
  const [height, width] = shape.slice(-2);
  const size = height * width;
  return { height, width, values: values.length === size ? values : Float32Array.from({ length: size }, (_, at) => {
    let sum = 0;
    for (let from = at; from < values.length; from += size) sum += values[from];
    return sum;
  }) };
}

function describe(state, reply, name, map) {
  // The class of the map (the receipt has it if it was the best one), its layer and its range: each map has its own scale.
  const receipt = reply.receipts[name];
  const chosen = METHODS[name].answerless || state.class === "" ? undefined : nameClass(state.labels, Number(state.class));
  const of = receipt.labels?.[0] ?? receipt.classes?.[0] ?? chosen;
  const layer = receipt.layer === "." ? "" : receipt.layer;
  const range = [Math.min, Math.max].map((end) => map.values.reduce((a, b) => end(a, b)).toPrecision(3)).join(" to ");
  return [of === undefined ? "" : `class ${of}`, layer, range, ...(reply.warnings ?? [])].filter(Boolean).join(". ");
}
