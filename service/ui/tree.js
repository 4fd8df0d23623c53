// The list of a model's layers: searched by name, glob and type; arrow keys move in it.

import { element, find } from "./dom.js";
import { matches } from "./selectors.js";

function fits(pattern, name) {
  // A text without * or ? matches anywhere in the name.
  return /[*?]/.test(pattern) ? matches(pattern, name) : name.toLowerCase().includes(pattern.toLowerCase());
}

export function writeShape(layer) {
  const last = layer.outputs.at(-1);
  return last ? last.shape.slice(1).join("×") : "never runs";
}

function writeName(layer, whole) {
  // Below its parent, a layer is listed by the last part of its name; in search results, by its full name.
  if (layer.name === ".") return ". (the whole model)";
  return whole ? layer.name : layer.name.slice(layer.name.lastIndexOf(".") + 1);
}

function makeRow(layer, cost, whole, onChoose) {
  const row = element("li");
  const button = element("button", undefined, { type: "button", "data-layer": layer.name, title: layer.name, tabindex: "-1" });
  const name = element("span", writeName(layer, whole), { class: "name" });
  const facts = element("span", `${layer.type} ${writeShape(layer)}`, { class: "facts" });
  const bar = element("span", undefined, { class: "cost", "aria-hidden": "true" });
  bar.style.setProperty("--share", String(cost));
  button.append(name, facts, bar);
  button.style.setProperty("--depth", String(Math.min(layer.name.split(".").length - 1, 6)));
  if (layer.hazards.length) button.append(element("span", layer.hazards.join("; "), { class: "hazard" }));
  button.disabled = !layer.outputs.length;
  button.addEventListener("click", () => onChoose(layer));
  row.append(button);
  return row;
}

export function showTypes(layers) {
  const types = [...new Set(layers.map((layer) => layer.type))].sort();
  const options = types.map((type) => element("option", type, { value: type }));
  find("type").replaceChildren(element("option", "every type", { value: "" }), ...options);
}

export function showLayers(layers, chosen, onChoose) {
  const [pattern, type] = [find("match").value.trim(), find("type").value];
  const rows = [];
  const most = Math.max(...layers.filter((each) => each.leaf).map((each) => each.share ?? 0), Number.MIN_VALUE);
  for (const layer of layers) {
    if ((!pattern || fits(pattern, layer.name)) && (!type || layer.type === type)) rows.push(makeRow(layer, layer.leaf ? (layer.share ?? 0) / most : 0, Boolean(pattern || type), onChoose));
  }
  find("tree").replaceChildren(...rows);
  find("tree").scrollTop = 0;
  find("layer-count").textContent = `${rows.length} of ${layers.length} layers`;
  mark(chosen);
}

export function mark(chosen) {
  const buttons = listButtons();
  for (const button of buttons) {
    if (button.dataset.layer === chosen) button.setAttribute("aria-current", "true");
    else button.removeAttribute("aria-current");
  }
  stopAt(findMarked() ?? buttons[0]);
}

export function reveal() {
  // Scroll the list, not the page, just enough to show the chosen layer.
  const [list, button] = [find("tree"), findMarked()];
  if (button) list.scrollTop = Math.min(Math.max(list.scrollTop, button.offsetTop + button.offsetHeight - list.clientHeight), button.offsetTop);
}

function listButtons() {
  return [...find("tree").querySelectorAll("button:not(:disabled)")];
}

function findMarked() {
  return find("tree").querySelector("[aria-current]");
}

function stopAt(button) {
  // The whole list is one Tab stop.
  find("tree").querySelector("[tabindex='0']")?.setAttribute("tabindex", "-1");
  button?.setAttribute("tabindex", "0");
}

export function installTree() {
  find("tree").addEventListener("focusin", (event) => event.target.matches("button") && stopAt(event.target));
  find("tree").addEventListener("keydown", (event) => {
    const buttons = listButtons();
    const at = buttons.indexOf(document.activeElement);
    const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    buttons[next]?.focus();
  });
}
