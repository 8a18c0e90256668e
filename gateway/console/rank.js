// The Rank panel: sends documents to /v1/rerank, or to /v1/score with labels of the user, and draws scores as they arrive.

import { stream } from "./api.js";
import { Bars, movesBetween } from "./bars.js";
import { byId, count, counted, duration, make, reveal, save, say, setOptions } from "./dom.js";
import { columnsOf, linesOf } from "./files.js";
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
  const lists = ["rank", "rank-other"].map((id) => {
    const element = byId(`${id}-list`).closest("section");
    return { id, element, model: null, bars: new Bars(element, viewOf, drawn), say: (what, text) => say(byId(`${id}-${what}`), text) };
  });
  const used = () => (lists[1].element.hidden ? lists.slice(0, 1) : lists);
  const showCode = codeBlock("rank-code");
  let abort = null;
  let opened = null; // the last file with columns: {columns, textsOf}

  byId("rank-documents").value = EXAMPLE.join("\n");
  byId("rank-before").value = BEFORE;
  byId("rank-after").value = AFTER;

  function refresh() {
    const mode = form.elements["rank-mode"].value;
    byId("rank-own").hidden = mode !== "labels";
    byId("rank-cutting").hidden = mode === "labels";
    byId("rank-chips").replaceChildren(...labels().map((label) => make("code", { text: label.replaceAll(" ", "␣") })));
    const documents = linesOf(byId("rank-documents").value);
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
    const others = served.models.filter((model) => model !== served.model).map(({ id }) => [id, id]);
    setOptions(byId("rank-other"), served.models.length ? [["", "no other model"], ...others] : []);
    byId("rank-comparing").hidden = !others.length;
    refresh();
  }

  async function run() {
    const documents = linesOf(byId("rank-documents").value);
    const other = served.models.find((model) => model.id === byId("rank-other").value);
    [served.model, other].forEach((model, at) => begin(lists[at], model, other !== undefined));
    byId("rank-lists").classList.toggle("two", other !== undefined);
    byId("rank-view").hidden = byId("rank-export").hidden = byId("rank-moves").hidden = true;
    reveal(byId("rank-results"));
    const problem = problemOf(documents);
    lists[0].say("error", problem);
    if (problem) return;
    abort = new AbortController();
    refresh();
    const mode = form.elements["rank-mode"].value;
    await Promise.all(used().map((list) => score(list, requestOf(mode, documents, list.model), documents, abort.signal)));
    abort = null;
    lists[0].bars.end();
    if (other) lists[1].bars.end(lists[0].bars);
    byId("rank-view").hidden = byId("rank-export").hidden = !used().some(({ bars }) => bars.known);
    refresh();
  }

  /** Remove the results of the run before, which would seem to be those of this one. */
  function begin(list, model, compared) {
    Object.assign(list, { model });
    list.element.hidden = !model;
    list.say("name", compared ? model?.id ?? "" : "");
    list.say("error", "");
    list.bars.begin([]);
    byId(`${list.id}-summary`).textContent = "";
  }

  /** Send a request, and draw its results in a list. */
  async function score({ id, bars, say: tell }, { path, body }, documents, signal) {
    byId(`${id}-summary`).textContent = `Scoring ${counted(documents.length, "document")}…`;
    bars.begin(documents);
    const began = performance.now();
    let last = null;
    try {
      for await (const event of stream(path, { body, signal })) {
        bars.add(resultsOf(event), performance.now() - began);
        last = event;
      }
      bars.use(last?.item_usage);
      bars.cut(listOf(last?.meta?.truncated));
      bars.fail(listOf(last?.errors));
      byId(`${id}-summary`).textContent = summary(bars, last, performance.now() - began);
    } catch (error) {
      const stopped = error.name === "AbortError";
      const done = `${count(bars.known)} of ${counted(documents.length, "document")}`;
      byId(`${id}-summary`).textContent = `${stopped ? "Stopped" : "Failed"} after ${done}.`;
      tell("error", stopped ? "" : error.text ?? String(error));
    }
    bars.end();
  }

  /** Say how many documents the lists show, and draw the moves between them. */
  function drawn() {
    const { bars } = lists[0];
    const all = bars.shown.length === bars.results.size;
    byId("rank-shown").textContent = all ? "" : `${count(bars.shown.length)} of ${counted(bars.results.size, "document")} shown`;
    byId("rank-moves").hidden = !lists[1].bars.before;
    if (lists[1].bars.before) byId("rank-moves").replaceChildren(movesBetween(bars, lists[1].bars));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!byId("rank-start").disabled) run();
  });
  form.addEventListener("input", refresh);
  byId("rank-stop").addEventListener("click", () => abort?.abort());
  byId("rank-view").addEventListener("input", () => used().forEach(({ bars }) => bars.draw()));
  byId("rank-other").addEventListener("change", () => delete byId("rank-other").dataset.wanted);
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
    fill(text);
    useColumn();
  });
  function useColumn() {
    if (opened) fill(opened.textsOf(byId("rank-column").value).map((text) => text.replace(/\s+/g, " ")).join("\n"));
  }
  function fill(text) {
    byId("rank-documents").value = text;
    byId("rank-documents").dispatchEvent(new Event("input", { bubbles: true })); // it is kept
  }
  byId("rank-column").addEventListener("change", useColumn);
  byId("rank-json").addEventListener("click", () => save("ranking.json", JSON.stringify(rowsOf(used()), null, 2)));
  byId("rank-csv").addEventListener("click", () => {
    const rows = rowsOf(used());
    const lines = rows.map((row) => Object.values(row).map(cellOf).join(","));
    save("ranking.csv", [Object.keys(rows[0] ?? {}).join(","), ...lines, ""].join("\r\n"));
  });
  served.addEventListener("models", useModel);
  addEventListener("pagehide", () => abort?.abort());
  useModel();
  return { shown: () => {} };
}

const labels = () => byId("rank-labels").value.split(",").filter((label) => label.trim());

/** What is shown of a ranking: of how many places, and of documents with which text. */
const viewOf = () => ({ top: Math.max(0, Math.floor(Number(byId("rank-top").value))), words: byId("rank-words").value });

/** The listed results of one list, or with the scores and places that another model gave them. */
function rowsOf([{ bars }, other]) {
  if (!other) return bars.rows();
  return bars.rows().map(({ index, ...row }) => {
    const [place, otherPlace] = [bars, other.bars].map(({ places }) => places.get(index) ?? null);
    return { index, ...row, place, other_model: other.model.id, other_score: other.bars.results.get(index)?.score ?? null, other_place: otherPlace };
  });
}

const listOf = (value) => (Array.isArray(value) ? value : []);

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
  const cut = byId("rank-cut").checked ? { truncate: true } : {};
  if (mode === "preset") return { path: "v1/rerank", body: { model: model?.id, query, documents, ...cut, ...common } };
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
  const cut = [...bars.results.values()].filter((result) => result.cut).length;
  if (cut) parts.push(`${count(cut)} cut to fit`);
  if (last?.meta?.query_truncated === true) parts.push("query cut to fit");
  const known = Number.isFinite(cached) ? `, ${count(cached)} of them from the cache` : "";
  if (Number.isFinite(usage.prompt_tokens)) parts.push(counted(usage.prompt_tokens, "token") + known);
  return `${[...parts, duration(ms)].join(" · ")}.`;
}

/** A value as a cell of CSV. */
const cellOf = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
