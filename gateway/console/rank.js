// The Rank panel: sends documents to /v1/rerank, or to /v1/score with labels of the user, and draws scores as they arrive.

import { stream } from "./api.js";
import { Bars } from "./bars.js";
import { byId, count, counted, duration, make, say } from "./dom.js";
import { codeBlock } from "./snippets.js";

const MAX_DOCUMENTS = 1000;
const MAX_CHARACTERS = 1 << 20;
const EXAMPLE = ["blue running shoes", "crimson jogging sneakers", "red wool scarf", "scarlet running trainers", "red hiking boots",
  "green canvas tent", "red shoes for running on trails", "waterproof red jacket"];
const BEFORE = "Query: {query}\nItem: ";
const AFTER = "\nRelevant:";
const COMMAND = "For more, use the command yardstick rerank.";

/** Connect the panel. Returns {shown}, which is told when the panel is opened or left. */
export function startRank(served) {
  const form = byId("rank-form");
  const bars = new Bars(byId("rank-list"), byId("rank-scale"));
  const showCode = codeBlock("rank-code");
  let abort = null;

  byId("rank-documents").value = EXAMPLE.join("\n");
  byId("rank-before").value = BEFORE;
  byId("rank-after").value = AFTER;

  function refresh() {
    const mode = form.elements["rank-mode"].value;
    byId("rank-own").hidden = mode !== "labels";
    byId("rank-chips").replaceChildren(...labels().map((label) => make("code", { text: label.replaceAll(" ", "␣") })));
    const documents = documentsOf(byId("rank-documents").value);
    byId("rank-count").textContent = counted(documents.length, "document");
    byId("rank-start").disabled = abort !== null || !served.model;
    byId("rank-stop").disabled = abort === null;
    showCode(requestOf(mode, documents, served.model));
  }

  function useModel() {
    const preset = presetOf(served.model);
    byId("rank-preset").textContent = preset ? `Preset of the model: ${preset}` : "Preset of the model: it has none for ranking";
    form.elements["rank-mode"][0].disabled = !preset;
    if (!preset && served.model) form.elements["rank-mode"].value = "labels";
    refresh();
  }

  async function run() {
    const documents = documentsOf(byId("rank-documents").value);
    const problem = problemOf(documents);
    say(byId("rank-error"), problem);
    if (problem) return;
    const request = requestOf(form.elements["rank-mode"].value, documents, served.model);
    abort = new AbortController();
    refresh();
    byId("rank-summary").textContent = `Scoring ${counted(documents.length, "document")}…`;
    bars.begin(documents);
    const began = performance.now();
    let last = null;
    try {
      for await (const event of stream(request.path, { body: request.body, signal: abort.signal })) {
        bars.add(resultsOf(event), performance.now() - began);
        last = event;
      }
      bars.use(last?.item_usage);
      bars.fail(Array.isArray(last?.errors) ? last.errors : []);
      byId("rank-summary").textContent = summary(bars, last, performance.now() - began);
    } catch (error) {
      const stopped = error.name === "AbortError";
      const done = `${count(bars.known)} of ${counted(documents.length, "document")}`;
      byId("rank-summary").textContent = `${stopped ? "Stopped" : "Failed"} after ${done}.`;
      say(byId("rank-error"), stopped ? "" : error.text ?? String(error));
    } finally {
      abort = null;
      bars.end();
      refresh();
    }
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!byId("rank-start").disabled) run();
  });
  form.addEventListener("input", refresh);
  byId("rank-stop").addEventListener("click", () => abort?.abort());
  byId("rank-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) say(byId("rank-error"), await openFile(file));
    refresh();
  });
  served.addEventListener("models", useModel);
  addEventListener("pagehide", () => abort?.abort());
  useModel();
  return { shown: () => {} };
}

const labels = () => byId("rank-labels").value.split(",").filter((label) => label.trim());

const documentsOf = (text) => text.split(/\r?\n/).filter((line) => line.trim());

const presetOf = (model) => (model?.preset?.task === "rerank" ? String(model.preset.name) : null);

/** What keeps the request from being sent; empty if nothing does. */
function problemOf(documents) {
  const characters = documents.reduce((sum, text) => sum + text.length, 0);
  if (!documents.length) return "Add at least one document.";
  if (documents.length > MAX_DOCUMENTS) {
    return `This page ranks at most ${count(MAX_DOCUMENTS)} documents at a time; there are ${count(documents.length)}. ${COMMAND}`;
  }
  if (characters > MAX_CHARACTERS) {
    return `This page sends at most ${count(MAX_CHARACTERS)} characters at a time; there are ${count(characters)}. ${COMMAND}`;
  }
  return "";
}

function requestOf(mode, documents, model) {
  const query = byId("rank-query").value;
  const common = { stream: true, partial_results: true, return_item_usage: true };
  if (mode === "preset") return { path: "v1/rerank", body: { model: model?.id, query, documents, ...common } };
  const items = documents.map((text) => text + byId("rank-after").value);
  const before = byId("rank-before").value.replaceAll("{query}", () => query);
  const scaled = byId("rank-softmax").checked;
  return { path: "v1/score", body: { model: model?.id, query: before, items, labels: labels(), apply_softmax: scaled, ...common } };
}

/** Results of an event as [index, score]; whatever is not a result is left out. */
function resultsOf(event) {
  const rows = Array.isArray(event.results) ? event.results : Array.isArray(event.data) ? event.data : [];
  return rows.map((row) => [row?.index, row?.relevance_score ?? row?.scores?.[0]]);
}

function summary(bars, last, ms) {
  const usage = last?.usage ?? {};
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const parts = [counted(bars.known, "document") + " scored"];
  if (bars.failed) parts.push(`${count(bars.failed)} failed`);
  const known = Number.isFinite(cached) ? `, ${count(cached)} of them from the cache` : "";
  if (Number.isFinite(usage.prompt_tokens)) parts.push(counted(usage.prompt_tokens, "token") + known);
  return `${[...parts, duration(ms)].join(" · ")}.`;
}

/** Put the lines of a file into the field. Returns what is wrong with it. */
async function openFile(file) {
  const most = 4 * MAX_CHARACTERS;
  if (file.size > most) return `The file has ${count(file.size)} bytes; this page opens files of up to ${count(most)} bytes.`;
  const text = await file.text();
  byId("rank-documents").value = file.name.endsWith(".jsonl") ? documentsOf(text).map(textOfRow).join("\n") : text;
  return "";
}

/** The text of a line of JSON: a string, or an object with `text`; any other line as it is. */
function textOfRow(line) {
  try {
    const row = JSON.parse(line);
    const text = typeof row === "string" ? row : row?.text;
    return typeof text === "string" ? text.replace(/\s+/g, " ") : line;
  } catch {
    return line;
  }
}
