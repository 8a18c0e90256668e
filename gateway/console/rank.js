// The Rank panel: sends documents to /v1/rerank, or to /v1/score with labels of the user, and draws scores as they arrive.

import { stream } from "./api.js";
import { Bars } from "./bars.js";
import { byId, count, counted, duration, make, save, say } from "./dom.js";
import { codeBlock } from "./snippets.js";

const MAX_DOCUMENTS = 1000;
const MAX_CHARACTERS = 1 << 20;
const EXAMPLE = ["blue running shoes", "crimson jogging sneakers", "red wool scarf", "scarlet running trainers", "red hiking boots",
  "green canvas tent", "red shoes for running on trails", "waterproof red jacket"];
const BEFORE = "Query: {query}\nItem: ";
const AFTER = "\nRelevant:";
const MAX_FILE_BYTES = 4 * MAX_CHARACTERS;
const USUAL = new Set(["text", "document", "content", "body"]); // names of columns of texts
const COMMAND = "For more, use the command yardstick rerank.";

/** Connect the panel. Returns {shown}, which is told when the panel is opened or left. */
export function startRank(served) {
  const form = byId("rank-form");
  const bars = new Bars(byId("rank-list"), byId("rank-scale"));
  const showCode = codeBlock("rank-code");
  let abort = null;
  let opened = null; // the last file with columns: {columns, textsOf}

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
    if (problem) {
      bars.begin([]); // results of other documents would seem to be those of this run
      byId("rank-summary").textContent = "";
      byId("rank-export").hidden = true;
      return;
    }
    const request = requestOf(form.elements["rank-mode"].value, documents, served.model);
    abort = new AbortController();
    refresh();
    byId("rank-summary").textContent = `Scoring ${counted(documents.length, "document")}…`;
    bars.begin(documents);
    byId("rank-export").hidden = true;
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
      byId("rank-export").hidden = !bars.known;
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
    if (!file) return;
    const problem = file.size > MAX_FILE_BYTES
      ? `The file has ${count(file.size)} bytes; this page opens files of up to ${count(MAX_FILE_BYTES)} bytes.` : "";
    say(byId("rank-error"), problem);
    if (problem) return;
    const text = await file.text();
    opened = columnsOf(file.name.toLowerCase(), text);
    byId("rank-columns").hidden = !opened?.columns.length;
    byId("rank-column").replaceChildren(...(opened?.columns ?? []).map((name) => make("option", { value: name, text: name })));
    byId("rank-column").value = opened?.columns.find((name) => USUAL.has(name.toLowerCase())) ?? opened?.columns[0] ?? "";
    byId("rank-documents").value = text;
    useColumn();
  });
  function useColumn() {
    if (opened) byId("rank-documents").value = opened.textsOf(byId("rank-column").value).map((text) => text.replace(/\s+/g, " ")).join("\n");
    refresh();
  }
  byId("rank-column").addEventListener("change", useColumn);
  byId("rank-json").addEventListener("click", () => save("ranking.json", JSON.stringify(bars.rows(), null, 2)));
  byId("rank-csv").addEventListener("click", () => {
    const rows = bars.rows().map((row) => Object.values(row).map(cellOf).join(","));
    save("ranking.csv", ["index,score,text,error", ...rows, ""].join("\r\n"));
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

/** A value as a cell of CSV. */
const cellOf = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;

/** The columns of a file, and the texts of each; null for a file of lines. */
function columnsOf(name, text) {
  if (name.endsWith(".jsonl")) {
    const rows = documentsOf(text).map(valueOf);
    const columns = new Set(rows.flatMap((row) => (typeof row === "string" ? [] : Object.keys(row).filter((key) => typeof row[key] === "string"))));
    return { columns: [...columns], textsOf: (column) => rows.map((row) => (typeof row === "string" ? row : String(row[column] ?? ""))) };
  }
  if (!/\.[ct]sv$/.test(name)) return null;
  const [head, ...rows] = rowsOf(text, name.endsWith(".tsv") ? "\t" : ",");
  return { columns: head ?? [], textsOf: (column) => rows.map((row) => row[head.indexOf(column)] ?? "") };
}

/** A line of JSON: a string or an object; any other line as it is. */
function valueOf(line) {
  try {
    const row = JSON.parse(line);
    return typeof row === "string" || (row && typeof row === "object") ? row : line;
  } catch {
    return line;
  }
}

/** Rows of CSV (RFC 4180): cells in quotes may have separators, line breaks and doubled quotes. Rows without text are left out. */
function rowsOf(text, separator) {
  const rows = [[]];
  let cell = "";
  let quoted = false;
  const characters = text.replace(/^\ufeff/, "").replaceAll("\r\n", "\n");
  for (let at = 0; at < characters.length; at += 1) {
    const character = characters[at];
    if (character === '"') {
      const doubled = quoted && characters[at + 1] === '"';
      if (doubled) {
        cell += character;
        at += 1;
      } else quoted = !quoted;
    } else if (quoted || (character !== separator && character !== "\n")) cell += character;
    else {
      rows.at(-1).push(cell);
      cell = "";
      if (character === "\n") rows.push([]);
    }
  }
  rows.at(-1).push(cell);
  return rows.filter((row) => row.some((each) => each.trim()));
}
