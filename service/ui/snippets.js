// What is on the screen as a request to make by hand: curl, Python, JSON. A comparison is two of them.

import { ProblemError } from "./api.js";
import { makeComparedLayers } from "./compare.js";
import { element, find } from "./dom.js";
import { makeBody, makeView } from "./requests.js";

const COSINE = "print(left.mean(0) @ right.mean(0) / np.linalg.norm(left.mean(0)) / np.linalg.norm(right.mean(0)))";
let chosen = "curl";

function listRequests(state) {
  // {side, name, layers, …}: one for the view, or one for each side of a comparison.
  if (!state.compared) return [{ side: state, name: "layers", ...makeView(state) }];
  return state.compared.sides.map((side, at) => ({ side, name: ["left", "right"][at], layers: makeComparedLayers(side) }));
}

function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function writeCurl(state) {
  const address = new URL("extract", document.baseURI).href;
  const key = sessionStorage.getItem("layertap-key") ? ' -H "Authorization: Bearer $LAYERTAP_API_KEY"' : "";
  const commands = listRequests(state).map(({ side, name, layers, objective }) => {
    const more = objective ? { objective: JSON.stringify(objective) } : {};
    const query = { model: side.model, layers: JSON.stringify(layers), format: "npz", ...more };
    const text = Object.entries(query).map(([field, value]) => `${field}=${encodeURIComponent(value)}`).join("&");
    const type = quote(`Content-Type: ${side.picture.type || "image/*"}`);
    return [`curl -sS${key} -H ${type}`, `--data-binary ${quote(`@${side.picture.name}`)}`, `-o ${name}.npz ${quote(`${address}?${text}`)}`].join(" \\\n  ");
  });
  return commands.join("\n");
}

function writePython(state) {
  const address = new URL(".", document.baseURI).href.replace(/[/]$/, "");
  const key = sessionStorage.getItem("layertap-key") ? ', api_key=os.environ["LAYERTAP_API_KEY"]' : "";
  const compared = state.compared;
  const calls = listRequests(state).map(({ side, name, layers, objective }) => {
    const call = `client.extract([${JSON.stringify(side.picture.name)}], ${JSON.stringify(layers)}`;
    if (compared) return `    ${name} = ${call})["maps"][0]${writePlaces(side.layout)}`;
    return `    result = ${call}${objective ? `, objective=${JSON.stringify(objective)}` : ""})`;
  });
  return [
    ...(key ? ["import os", ""] : []),
    ...(compared?.cosine === undefined ? [] : ["import numpy as np", ""]),
    "from layertap_client import Client",
    "",
    `with Client(${JSON.stringify(address)}, model=${JSON.stringify(state.model)}${key}) as client:`,
    ...calls,
    ...(compared ? ["", compared.cosine === undefined ? "print(left.shape, right.shape)" : COSINE] : ['    print(result["maps"].shape, result["maps"].min(), result["maps"].max())']),
  ].join("\n");
}

function writePlaces({ kind, channels, skip }) {
  // What makes an array of one row to one of (places, channels).
  if (kind === "bars") return ".reshape(1, -1)";
  if (kind === "chw") return `.reshape(${channels}, -1).T`;
  return skip ? `[${skip}:]` : `.reshape(-1, ${channels})`;
}

function writeJson(state) {
  const bodies = listRequests(state).map(({ side, layers, objective }) => ({ ...makeBody(side, layers, { objective }), inputs: [{ image: "… base64 …" }] }));
  return JSON.stringify(bodies.length === 1 ? bodies[0] : bodies, null, 1);
}

const FORMS = { curl: writeCurl, Python: writePython, JSON: writeJson };

export function showSnippet(state) {
  const write = () => {
    find("snippet").textContent = FORMS[chosen](state);
  };
  const buttons = Object.keys(FORMS).map((name) => {
    const button = element("button", name, { type: "button", "aria-pressed": String(name === chosen) });
    button.addEventListener("click", () => {
      chosen = name;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
      write();
    });
    return button;
  });
  find("share-buttons").replaceChildren(...buttons);
  write();
}

function copySnippet() {
  // As a person copies: pages of plain HTTP have no navigator.clipboard, and what is selected is there to copy by keys.
  getSelection().selectAllChildren(find("snippet"));
  if (!document.execCommand("copy")) throw new ProblemError(null, "The browser did not copy the text.", "It is selected: press Ctrl+C.");
  return "Copied.";
}

export function installSnippets(run) {
  find("copy").addEventListener("click", () => run(copySnippet, "page"));
}
