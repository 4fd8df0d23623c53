// Maps of what speaks for an answer, each over the picture as it is preprocessed; several methods stand side by side.

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

// What a model must have for a method, and about how long that takes, in forwards: a backward counts two.
const METHODS = {
  grad_cam: { title: "Grad-CAM", fits: hasMaps, forwards: 3 },
  grad_cam_plusplus: { title: "Grad-CAM++", fits: hasMaps, forwards: 3 },
  saliency: { title: "Saliency", fits: () => true, forwards: 3 },
  guided_backpropagation: { title: "Guided backprop", fits: hasRelu, forwards: 3 },
  integrated_gradients: { title: "Integrated gradients", fits: hasOneInput, forwards: 150 },
  smoothgrad: { title: "SmoothGrad", fits: hasOneInput, forwards: 75 },
  occlusion: { title: "Occlusion", fits: hasOneInput, forwards: 225 },
  attention_rollout: { title: "Attention rollout", fits: hasAttention, forwards: 1, answerless: true },
  gradient_rollout: { title: "Gradient rollout", fits: hasAttention, forwards: 3 },
  relevance: { title: "Relevance", fits: hasAttention, forwards: 3 },
};
const SLOW = 20; // forwards from which on it is said how long they take
const answers = new Map(); // of the picture and the class: {map, scale} by method

export function listMethods(state) {
  // Those that the model can do.
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
  answers.clear();
  find("explanations").replaceChildren();
}

function makeFigure(state, name, onCancel) {
  // The picture, and over it what is to come: replaces the method's figure, or stands after the others.
  const figure = element("figure", undefined, { "data-method": name, class: "busy" });
  const frame = element("button", undefined, { type: "button", class: "frame", "aria-label": `${METHODS[name].title}: enlarge` });
  if (state.picture.width) frame.append(element("img", undefined, { src: state.picture.url, alt: "" }));
  const canvas = element("canvas");
  frame.append(canvas);
  fit(canvas, state.picture.width ? state.seen : [0, 0, 1, 1]);
  frame.disabled = true;
  const caption = element("figcaption");
  caption.append(element("span", METHODS[name].title, { class: "name" }), element("span", "", { class: "quiet" }));
  figure.append(frame, caption);
  if (METHODS[name].forwards >= SLOW) figure.append(makeProgress(state.seconds * METHODS[name].forwards), makeCancel(name, onCancel));
  const old = [...find("explanations").children].find((each) => each.dataset.method === name);
  if (old) old.replaceWith(figure);
  else find("explanations").append(figure);
  return { figure, frame, canvas, note: caption.lastChild };
}

function makeProgress(expected) {
  // By the clock: the server does not tell how far it is.
  const bar = element("progress", undefined, { max: "1", "aria-label": `about ${Math.max(Math.round(expected), 1)} seconds` });
  const started = performance.now();
  bar.value = 0;
  const timer = setInterval(() => {
    if (!bar.isConnected) return clearInterval(timer);
    const share = (performance.now() - started) / 1000 / Math.max(expected, 0.5);
    bar.value = 1 - Math.exp(-1.5 * share); // never done before it is
    return undefined;
  }, 200);
  return bar;
}

function makeCancel(name, onCancel) {
  const button = element("button", "Cancel", { type: "button", class: "cancel", "aria-label": `Cancel ${METHODS[name].title}` });
  button.addEventListener("click", onCancel);
  return button;
}

export async function showExplanation(state, name, signal, onCancel) {
  answers.delete(name); // it may be of another class
  showOverlay(state);
  const { figure, frame, canvas, note } = makeFigure(state, name, onCancel);
  const body = { model: state.model, inputs: [{ image: state.picture.data }], method: name, encoding: "base64" };
  if (!METHODS[name].answerless) body.objective = makeObjective(state);
  let reply;
  try {
    reply = await ask("explain", body, signal);
  } catch (error) {
    note.textContent = [422, 429].includes(error.status) ? error.message : "No answer";
    if (error.status === 422) return; // it is not of this model, which is no problem
    throw error;
  } finally {
    figure.classList.remove("busy");
    for (const each of figure.querySelectorAll("progress, .cancel")) each.remove();
  }
  const map = { ...readMap(decode(reply.features[name])), label: METHODS[name].title };
  const scale = makeOverlayScale(map.values);
  (state.picture.width ? paintOverlay : paint)(canvas, map, scale);
  frame.disabled = false;
  frame.addEventListener("click", () => zoom(map, scale));
  note.textContent = describe(state, reply, name);
  answers.set(name, { map, scale });
  showOverlay(state);
}

function readMap({ shape, values }) {
  // A map; of one with a number for each channel their sum.
  const [height, width] = shape.slice(-2);
  const size = height * width;
  return { height, width, values: values.length === size ? values : Float32Array.from({ length: size }, (_, at) => {
    let sum = 0;
    for (let from = at; from < values.length; from += size) sum += values[from];
    return sum;
  }) };
}

function describe(state, reply, name) {
  // Which class it is of: the receipt tells it where it was the best one.
  const receipt = reply.receipts[name];
  const chosen = METHODS[name].answerless || state.class === "" ? undefined : nameClass(state.labels, Number(state.class));
  const of = receipt.labels?.[0] ?? receipt.classes?.[0] ?? chosen;
  return [of === undefined ? "" : `class ${of}`, ...(reply.warnings ?? [])].filter(Boolean).join(". ");
}

export function showOverlay(state) {
  // Over the picture itself the map that was chosen last; where attention is shown, this is.
  if (state.site === "attention") return;
  const answer = answers.get(state.methods.findLast((name) => answers.has(name)));
  find("overlay").hidden = !answer || !state.picture?.width;
  if (!answer) return;
  paintOverlay(find("overlay"), answer.map, answer.scale);
  fit(find("overlay"), state.seen);
}
