// Earlier runs of the Write panel, in the local storage of the browser: what they wrote, and the fields to write it again.

import { byId, counted, make } from "./dom.js";
import { restore, store, stored } from "./state.js";

const STORE = "yardstick.console.runs";
const MAX_RUNS = 20;
const MAX_TEXT = 2000; // characters of an answer that are kept
const MAX_CHARACTERS = 400_000; // of all runs as JSON

/** Show the runs of earlier visits. Returns a function that adds a run: {run, fields, text, calls, tokens, finish}. */
export function startHistory() {
  const details = byId("write-history");
  const list = details.querySelector("ol");
  const before = stored(STORE)?.runs;
  let runs = (Array.isArray(before) ? before : []).slice(0, MAX_RUNS).map(runOf).filter(Boolean);

  function draw() {
    details.hidden = !runs.length;
    details.querySelector("summary").textContent = `Earlier runs (${runs.length})`;
    list.replaceChildren(...runs.map((run) => {
      const use = make("button", { type: "button", class: "plain", text: "Use its fields", onclick: () => restore(run.fields),
        "aria-label": `Use the fields of the run of ${when(run.at)}` });
      const facts = [when(run.at), run.run, run.fields.model, counted(run.tokens, "token"), run.finish].filter(Boolean).join(" · ");
      return make("li", {}, make("div", { class: "row spread" }, make("span", { class: "hint", text: facts }), use),
        make("p", { class: "asked", text: String(run.fields["write-text"] ?? "") }), make("p", { class: "bar-text", text: run.text }));
    }));
  }

  function keep(changed) {
    runs = changed;
    while (!store(STORE, { runs }, MAX_CHARACTERS) && runs.length) runs.pop();
    draw();
  }

  details.querySelector("button").addEventListener("click", () => keep([]));
  draw();
  return ({ run, fields, text, calls, tokens, finish }) => {
    const called = calls.filter(Boolean).map((call) => `${call.name}(${call.arguments})`);
    const shown = [text, ...called].filter(Boolean).join("\n").slice(0, MAX_TEXT);
    if (shown) keep([{ at: Date.now(), run, text: shown, tokens, finish, fields }, ...runs].slice(0, MAX_RUNS));
  };
}

const when = (at) => new Date(at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

/** A run of the storage, which may be anybody's; null where it is none. */
function runOf(value) {
  const { at, run, text, tokens, finish, fields } = value ?? {};
  const right = Number.isFinite(at) && Math.abs(at) < 8e15 && Number.isFinite(tokens) && [run, text, finish].every((each) => typeof each === "string");
  if (!right || fields === null || typeof fields !== "object") return null;
  return { at, run, text: text.slice(0, MAX_TEXT), tokens, finish, fields };
}
