// One thing at a time in each part of the page; problems in words, and what helps: a key, a wait, a button.

import { ProblemError } from "./api.js";
import { find } from "./dom.js";

const RETRIES = 40;

export function makeRunner(findModel) {
  // {run, stop, retry, isWaiting}. findModel(part) is the entry of the model that a part of the page asks, as it is now.
  const waiting = new Map(); // what a retry does again, by parts of the page
  const asking = {}; // by parts of the page, what is asked now; a newer choice ends it
  let pending = 0;

  function clearProblem() {
    find("problem").hidden = true;
    find("key-form").hidden = true;
  }

  async function showProblem(error, again, part, tries) {
    // Returns what is to be said meanwhile.
    if (error.name === "AbortError") return "";
    if (!(error instanceof ProblemError)) throw error;
    const { signal } = asking[part];
    waiting.set(part, again);
    const entry = error.status === 503 ? await findModel(part).catch(() => null) : null;
    if (signal.aborted) return "";
    const failed = entry?.state === "failed";
    if (error.status === 401) {
      find("key-form").hidden = false;
      find("key").focus();
    }
    find("problem-text").textContent = failed && entry.reason ? `${error.message} (${entry.reason})` : error.message;
    find("problem-hint").textContent = error.hint;
    find("problem").hidden = error.status === 401 && !sessionStorage.getItem("layertap-key");
    find("retry").hidden = ![0, 429, 503, 504].includes(error.status) || failed;
    if (error.status !== 503 || failed || tries >= RETRIES) return "";
    setTimeout(() => !signal.aborted && run(again, part, tries + 1), Math.max(error.seconds, 0.5) * 1000);
    return "The model is loading …";
  }

  function stop(part) {
    asking[part]?.abort();
    waiting.delete(part);
    if (waiting.size === 0) clearProblem();
  }

  async function run(action, part = "all", tries = 0) {
    // What was asked before in a part is given up, in all parts by what is of all.
    for (const each of part === "all" ? Object.keys(asking) : [part]) {
      asking[each]?.abort();
      waiting.delete(each);
    }
    asking[part] = new AbortController();
    const { signal } = asking[part];
    let text = "";
    pending += 1;
    find("status").textContent = "Asking …";
    try {
      text = (await action(signal)) ?? "";
      if (waiting.size === 0) clearProblem();
    } catch (error) {
      if (!signal.aborted) text = await showProblem(error, action, part, tries);
    } finally {
      pending -= 1;
      if (pending === 0) find("status").textContent = text;
    }
  }

  function retry() {
    for (const [part, again] of [...waiting]) run(again, part);
  }

  return { run, stop, retry, isWaiting: () => waiting.size > 0 };
}
