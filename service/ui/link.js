// The view as a link: everything except the user's own pictures; samples are linked by name.

const TEXTS = ["model", "layer", "site", "class"];
const SITES = ["grad_output", "attention"];

export function writeHash(state) {
  const parts = new URLSearchParams();
  for (const name of TEXTS) if (state[name] !== "" && state[name] !== "output") parts.set(name, state[name]);
  if (state.methods.length) parts.set("method", state.methods.join(","));
  if (state.each) parts.set("each", "1");
  if (state.shown > 16) parts.set("shown", String(state.shown));
  if (state.picture?.sample) parts.set("sample", state.picture.sample);
  if (state.other.layer) parts.set("other-layer", state.other.layer);
  if (state.other.picture?.sample) parts.set("other-sample", state.other.picture.sample);
  history.replaceState(null, "", `#${parts}`);
}

export function readHash() {
  // {state, otherLayer, sample, otherSample}; invalid values are left out.
  const parts = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const name of TEXTS) if (parts.has(name)) state[name] = parts.get(name);
  if (!SITES.includes(state.site)) delete state.site;
  if (!/^\d*$/.test(state.class ?? "")) delete state.class;
  state.methods = [...new Set((parts.get("method") ?? "").split(",").filter(Boolean))]; // methods that the model does not support are removed once it is known
  state.each = parts.get("each") === "1";
  state.shown = Math.min(Math.max(Number.parseInt(parts.get("shown") ?? "16", 10) || 16, 16), 1024);
  return { state, otherLayer: parts.get("other-layer") ?? "", sample: parts.get("sample") ?? "", otherSample: parts.get("other-sample") ?? "" };
}
