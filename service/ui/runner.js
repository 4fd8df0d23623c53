// Runs one action at a time in each part of the page; shows the status and problems, and offers a key, a wait, a retry.

import { ProblemError } from "./api.js";
import { find } from "./dom.js";

const RETRIES = 40;
const PASSING = [0, 429, 503, 504]; // statuses that may change if the request is repeated

export function makeRunner(findModel) {
  // {run, stop, retry, isWaiting}. findModel() returns the current entry of the chosen model.
  const asking = {}; // by part of the page, the running request; a newer choice aborts it
  const problems = new Map(); // by part, the newest last: {text, hint, status, again, passes, loads}
  let pending = 0;
  let done = ""; // the text of the last action

  function show() {
    // Show the status and the newest problem: no other code writes these.
    const problem = [...problems.values()].at(-1);
    const needsKey = problem?.status === 401;
    find("status").textContent = pending ? "Asking …" : problem ? nameProblem(problem) : done;
    find("problem-text").textContent = problem?.text ?? "";
    find("problem-hint").textContent = problem?.hint ?? "";
    find("problem").hidden = !problem || (needsKey && !sessionStorage.getItem("layertap-key"));
    find("retry").hidden = !problem?.passes;
    const appears = needsKey && find("key-form").hidden;
    find("key-form").hidden = !needsKey;
    if (appears) find("key").focus();
  }

  function nameProblem({ status, loads }) {
    if (loads) return "The model is loading …";
    return status === 401 ? "A key is needed." : "Failed: see the message.";
  }

  function keep(part, problem) {
    problems.delete(part);
    problems.set(part, problem);
  }

  function keepFailure(part, error, again) {
    keep(part, { text: `The page failed: ${error}`, hint: "Reload the page.", again });
  }

  async function keepProblem(error, again, part, tries) {
    const { signal } = asking[part];
    const { status, hint } = error;
    const entry = status === 503 ? await findModel().catch(() => null) : null;
    if (signal.aborted) return;
    const failed = entry?.state === "failed";
    const text = failed && entry.reason ? `${error.message} (${entry.reason})` : error.message;
    const loads = status === 503 && !failed && tries < RETRIES;
    keep(part, { text, hint, status, again, passes: PASSING.includes(status) && !failed, loads });
    if (loads) setTimeout(() => !signal.aborted && run(again, part, tries + 1), Math.max(error.seconds, 0.5) * 1000);
  }

  function stop(part) {
    asking[part]?.abort();
    problems.delete(part);
    show();
  }

  async function run(action, part = "all", tries = 0) {
    // Abort the part's earlier request, or those of all parts for "all". The part's problem stays until this one ends.
    for (const each of part === "all" ? Object.keys(asking) : [part]) {
      asking[each]?.abort();
      if (each !== part) problems.delete(each);
    }
    problems.delete("page"); // the next action ends problems that belong to no part
    if (problems.has(part)) problems.get(part).again = action;
    asking[part] = new AbortController();
    const { signal } = asking[part];
    pending += 1;
    done = "";
    show();
    try {
      const text = await action(signal);
      if (signal.aborted) return;
      problems.delete(part);
      done = text ?? "";
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ProblemError) await keepProblem(error, action, part, tries);
      else {
        console.error(error);
        keepFailure(part, error, action);
      }
    } finally {
      pending -= 1;
      show();
    }
  }

  function retry() {
    for (const [part, { again }] of [...problems]) if (again) run(again, part);
  }

  addEventListener("error", (event) => {
    keepFailure("page", event.message);
    show();
  });
  return { run, stop, retry, isWaiting: () => problems.size > 0 };
}
