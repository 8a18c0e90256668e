// The Write panel: one text, or two side by side, each with its own length guidance.

import { byId, reveal, say } from "./dom.js";
import { startHistory } from "./history.js";
import { Run } from "./run.js";
import { codeBlock } from "./snippets.js";

const MAX_CHARACTERS = 100_000;

/** Connect the panel. Returns {shown}, which is told when the panel is opened or left. */
export function startWrite(served) {
  const form = byId("write-form");
  const showCode = codeBlock("write-code");
  const settings = () => settingsOf(served.model);
  const remember = startHistory();
  const runs = ["Run A", "Run B"].map((name) => new Run(name, settings, refresh, remember));
  byId("write-runs").append(...runs.map((run) => run.element));
  const used = () => (byId("write-two").checked ? runs : runs.slice(0, 1));
  let touched = runs[0]; // the run whose request is shown as code
  for (const run of runs) {
    run.element.addEventListener("focusin", () => {
      touched = run;
      refresh();
    });
  }

  function refresh() {
    const busy = runs.some((run) => run.busy);
    byId("write-start").disabled = busy || !served.model;
    byId("write-stop").disabled = !busy;
    const chat = byId("write-kind").value === "chat";
    for (const element of form.querySelectorAll(".chat-only")) element.hidden = !chat;
    const given = ["system", "schema", "tools"].filter((id) => byId(`write-${id}`).value.trim() && (chat || id === "schema")).length;
    byId("write-more-title").textContent = `System message, JSON Schema, tools${given ? ` (${given} set)` : ""}`;
    runs[1].element.hidden = !byId("write-two").checked;
    byId("write-runs").classList.toggle("two", byId("write-two").checked);
    const [shown, others] = used().includes(touched) ? [touched, used().length > 1] : [runs[0], false];
    showCode(shown.request(), others ? shown.name : "");
  }

  function useModel() {
    for (const run of runs) run.useModel(served.model);
    refresh();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (byId("write-start").disabled) return;
    const problem = problemOf(served.model);
    reveal(byId("write-runs"));
    for (const run of used()) {
      if (problem) {
        run.reset();
        say(run.error, problem);
      } else run.start();
    }
  });
  form.addEventListener("input", () => {
    for (const run of runs) run.last = null;
    if (!byId("write-two").checked) runs[1].stop();
    refresh();
  });
  byId("write-stop").addEventListener("click", () => runs.forEach((run) => run.stop()));
  served.addEventListener("models", useModel);
  addEventListener("pagehide", () => runs.forEach((run) => run.stop()));
  useModel();
  return { shown: () => {} };
}

/** What the form asks for. `problems` has what is wrong with its JSON. */
function settingsOf(model) {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  const chat = byId("write-kind").value === "chat";
  const problems = [];
  const parsed = (id, name, right) => {
    if (!byId(id).value.trim()) return undefined;
    try {
      const value = JSON.parse(byId(id).value);
      if (right(value)) return value;
      problems.push(`${name} of another type.`);
    } catch (error) {
      problems.push(`${name} not JSON: ${error.message}.`);
    }
    return undefined;
  };
  const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
  return {
    model: model?.id,
    text: byId("write-text").value,
    chat,
    system: chat ? byId("write-system").value : "",
    schema: parsed("write-schema", "The JSON Schema must be an object; it is", isObject),
    tools: chat ? parsed("write-tools", "Tools must be a list of objects; they are", (value) => Array.isArray(value) && value.every(isObject)) : undefined,
    toolChoice: byId("write-choice").value,
    temperature: number("write-temperature"),
    maxTokens: number("write-max") ?? 200,
    seed: number("write-seed"),
    problems,
  };
}

function problemOf(model) {
  const { text, system, problems } = settingsOf(model);
  if (!text.trim()) return "Write a message first.";
  const characters = [text, system, byId("write-schema").value, byId("write-tools").value].reduce((sum, each) => sum + each.length, 0);
  if (characters > MAX_CHARACTERS) return `This page sends texts of up to ${MAX_CHARACTERS.toLocaleString("en")} characters.`;
  if (!model.capabilities.includes("generate")) return `The model ${model.id} does not generate text.`;
  return problems[0] ?? "";
}
