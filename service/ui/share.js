// The view as a link, and as a request to make by hand.

import { element, find } from "./maps.js";
import { makeBody, makeObjective, makeViewLayers } from "./view.js";

const TEXTS = ["model", "layer", "site", "method", "class"];
let chosen = "curl";

export function writeHash(state) {
  // All but the picture, which stays with whoever has it; a sample goes by its name.
  const parts = new URLSearchParams();
  for (const name of TEXTS) if (state[name] !== "" && state[name] !== "output") parts.set(name, state[name]);
  if (state.each) parts.set("each", "1");
  if (state.shown > 16) parts.set("shown", String(state.shown));
  if (state.picture?.sample) parts.set("sample", state.picture.sample);
  history.replaceState(null, "", `#${parts}`);
}

export function readHash() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const name of TEXTS) if (parts.has(name)) state[name] = parts.get(name);
  if (!["grad_output", "attention"].includes(state.site)) delete state.site;
  if (!/^\d*$/.test(state.class ?? "")) delete state.class;
  if (!["grad_cam", "saliency", "attention_rollout"].includes(state.method)) delete state.method;
  state.each = parts.get("each") === "1";
  state.shown = Math.min(Math.max(Number.parseInt(parts.get("shown") ?? "16", 10) || 16, 16), 1024);
  return { state, sample: parts.get("sample") ?? "" };
}

function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

function writeQuery(state, layers) {
  const query = { model: state.model, layers: JSON.stringify(layers), format: "npz" };
  if (state.site === "grad_output") query.objective = JSON.stringify(makeObjective(state));
  return Object.entries(query).map(([key, value]) => `${key}=${encodeURIComponent(value)}`).join("&");
}

function writeCurl(state, layers) {
  const address = new URL("extract", document.baseURI).href;
  const key = sessionStorage.getItem("layertap-key") ? ' -H "Authorization: Bearer $LAYERTAP_KEY"' : "";
  const type = state.picture.type || "image/*";
  const words = [`curl -sS${key} -H ${quote(`Content-Type: ${type}`)}`, `--data-binary ${quote(`@${state.picture.name}`)}`, `-o layers.npz ${quote(`${address}?${writeQuery(state, layers)}`)}`];
  return words.join(" \\\n  ");
}

function writeLiteral(value) {
  // A value as Python writes it: JSON, but for the names of three constants.
  if (Array.isArray(value)) return `[${value.map(writeLiteral).join(", ")}]`;
  if (value === true) return "True";
  if (value && typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${writeLiteral(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}

function writePython(state, layers) {
  const address = new URL(".", document.baseURI).href.replace(/[/]$/, "");
  const key = sessionStorage.getItem("layertap-key") ? ', api_key=os.environ["LAYERTAP_KEY"]' : "";
  const objective = state.site === "grad_output" ? `, objective=${writeLiteral(makeObjective(state))}` : "";
  return [
    ...(key ? ["import os", ""] : []),
    "from layertap_client import Client",
    "",
    `with Client(${JSON.stringify(address)}, model=${JSON.stringify(state.model)}${key}) as client:`,
    `    result = client.extract([${JSON.stringify(state.picture.name)}], ${writeLiteral(layers)}${objective})`,
    '    print(result["maps"].shape, result["maps"].min(), result["maps"].max())',
  ].join("\n");
}

function writeJson(state, layers) {
  return JSON.stringify({ ...makeBody(state, layers), inputs: [{ image: "… base64 …" }] }, null, 1);
}

const FORMS = { curl: writeCurl, Python: writePython, JSON: writeJson };

export function showSnippet(state) {
  const layers = makeViewLayers(state);
  const write = () => {
    find("snippet").textContent = FORMS[chosen](state, layers);
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
  find("copy").onclick = async () => {
    await navigator.clipboard.writeText(find("snippet").textContent);
    find("status").textContent = "Copied.";
  };
}
