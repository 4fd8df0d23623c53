// The current view as a request to copy: curl, Python, JSON.

import { ProblemError } from "./api.js";
import { element, find } from "./dom.js";
import { makeBody, makeView } from "./requests.js";

let chosen = "curl";

function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function listParameters({ layers, objective }) {
  // A layer that a selector names is written so, whole: JSON in an address is hard to read.
  const { layer, site, as, channels, ...more } = layers[0];
  const isPlain = !Object.keys(more).length && /^[^,[{][^,]*$/u.test(layer);
  const text = isPlain ? [layer, site].filter(Boolean).join(":") : JSON.stringify(layers);
  return [["layers", text], ...(objective ? [["objective", objective.kind], ["class", objective.class]] : [])];
}

function writeCurl(state) {
  const address = new URL("extract", document.baseURI).href;
  const key = sessionStorage.getItem("layertap-key") ? ' -H "Authorization: Bearer $LAYERTAP_API_KEY"' : "";
  const parameters = [["model", state.model], ...listParameters(makeView(state)), ["format", "npz"]];
  const query = parameters.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%3A", ":")}`).join("&");
  const type = quote(`Content-Type: ${state.picture.type || "image/*"}`);
  return [`curl -sS${key} -H ${type}`, `--data-binary ${quote(`@${state.picture.name}`)}`, `-o layers.npz ${quote(`${address}?${query}`)}`].join(" \\\n  ");
}

function writePython(state) {
  const address = new URL(".", document.baseURI).href.replace(/[/]$/, "");
  const key = sessionStorage.getItem("layertap-key") ? ', api_key=os.environ["LAYERTAP_API_KEY"]' : "";
  const { layers, objective } = makeView(state);
  const more = objective ? `, objective=${JSON.stringify(objective)}` : "";
  return [
    ...(key ? ["import os", ""] : []),
    "from layertap_client import Client",
    "",
    `with Client(${JSON.stringify(address)}, model=${JSON.stringify(state.model)}${key}) as client:`,
    `    result = client.extract([${JSON.stringify(state.picture.name)}], ${JSON.stringify(layers)}${more})`,
    '    print(result["maps"].shape, result["maps"].min(), result["maps"].max())',
  ].join("\n");
}

function writeJson(state) {
  const { layers, ...more } = makeView(state);
  return JSON.stringify({ ...makeBody(state, layers, more), inputs: [{ image: "… base64 …" }] }, null, 1);
}

const FORMS = { curl: writeCurl, Python: writePython, JSON: writeJson };

export function showSnippet(state) {
  find("snippet").textContent = FORMS[chosen](state);
  for (const button of find("share-buttons").children) button.setAttribute("aria-pressed", String(button.textContent === chosen));
}

function copySnippet() {
  // As a user copies: pages over plain HTTP have no navigator.clipboard, but the selected text can be copied by keyboard.
  getSelection().selectAllChildren(find("snippet"));
  if (!document.execCommand("copy")) throw new ProblemError(null, "The browser did not copy the text.", "It is selected: press Ctrl+C.");
  return "Copied.";
}

export function installSnippets(state, run) {
  for (const name of Object.keys(FORMS)) {
    const button = element("button", name, { type: "button" });
    button.addEventListener("click", () => {
      chosen = name;
      showSnippet(state);
    });
    find("share-buttons").append(button);
  }
  find("copy").addEventListener("click", () => run(copySnippet, "page"));
}
