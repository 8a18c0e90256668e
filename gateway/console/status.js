// The Status panel: engines, queues, rates, models and limits, sampled from /metrics while the panel is open.

import { call, limits, readText, signals } from "./api.js";
import { byId, count, make, say, table } from "./dom.js";
import { parseMetrics, Series, sum } from "./metrics.js";
import { codeBlock } from "./snippets.js";
import { sparkline } from "./sparkline.js";

const SAMPLE_MS = 2000;
const SAMPLES = 120;
const MAX_ROWS = 200;
const LEAST_SAMPLES = 20;
const CATALOGUE_SAMPLES = 5; // samples between two looks at the catalogues
const is = (name, value) => (labels) => labels[name] === value;
const isApi = (labels) => !["/metrics", "/", "/console/{name}", "/livez", "/readyz"].includes(labels.route);

// name, unit, where the number is from, and whether it is a counter
const TILES = [
  ["Requests", "a second", (m) => sum(m, "requests_total", isApi), true],
  ["In progress", "requests", (m) => sum(m, "requests_in_flight"), false],
  ["Waiting for an engine", "requests", (m) => sum(m, "requests_waiting"), false],
  ["Waiting to be read", "requests", (m) => sum(m, "text_queue"), false],
  ["Items scored", "a second", (m) => sum(m, "items_total"), true],
  ["Tokens written", "a second", (m) => sum(m, "tokens_total", is("kind", "completion")), true],
  ["Prompt tokens", "a second", (m) => sum(m, "tokens_total", is("kind", "prompt")), true],
  ["Results from the cache", "a second", (m) => sum(m, "cache_lookups_total", is("result", "hit")), true],
];

/** Connect the panel. Returns {shown}, which is told when the panel is opened or left. */
export function startStatus(served) {
  const series = TILES.map(() => new Series(SAMPLES));
  let open = false;
  let timer = null;
  let abort = null;
  let sampled = 0;
  let opened = new Map(); // what engines had counted when the panel was opened

  async function sample() {
    clearTimeout(timer);
    if (!open || document.hidden) return;
    abort?.abort();
    abort = new AbortController();
    try {
      const metrics = parseMetrics(await readText("metrics", { signal: abort.signal }));
      if (!metrics.size) throw Object.assign(new Error(), { text: "The answer of /metrics has no metrics of Yardstick." });
      const now = performance.now() / 1000;
      TILES.forEach(([, , read, counter], place) => {
        if (counter) series[place].pushCounter(read(metrics), now);
        else series[place].push(read(metrics));
      });
      drawTiles(series);
      drawEngines(metrics);
      drawItemCaches(metrics, opened);
      if (sampled++ % CATALOGUE_SAMPLES === 0) await drawCatalogues(abort.signal);
      say(byId("status-error"), "");
      byId("status-line").textContent = lineOf(metrics);
    } catch (error) {
      if (error.name === "AbortError") return;
      const hint = "Metrics are not shown where a proxy or an ingress does not admit /metrics.";
      say(byId("status-error"), `${error.text ?? error} ${hint}`);
      byId("status-line").textContent = "";
    }
    timer = setTimeout(sample, SAMPLE_MS);
  }

  served.addEventListener("models", () => drawModels(served.models));
  signals.addEventListener("limits", drawLimits);
  document.addEventListener("visibilitychange", sample);
  drawModels(served.models);
  drawLimits();
  const showCode = codeBlock("status-code");
  served.addEventListener("models", () => showCode({ path: "v1/models" }));
  showCode({ path: "v1/models" });
  return {
    shown(now) {
      open = now;
      sampled = 0;
      opened = new Map();
      if (open) sample();
      else abort?.abort();
    },
  };
}

function lineOf(metrics) {
  const ready = sum(metrics, "engines_ready");
  return ready ? `${count(ready)} ${ready === 1 ? "engine takes" : "engines take"} requests.` : "No engine takes requests.";
}

function drawTiles(series) {
  byId("status-tiles").replaceChildren(...TILES.map(([name, unit], place) => {
    const { values, last } = series[place];
    const value = last === null ? "–" : count(last);
    const most = values.length ? Math.max(...values) : 0;
    return make("div", { class: "tile" }, make("h3", { text: name }), make("p", {}, make("strong", { text: value }), ` ${unit}`),
      sparkline(values, `${name}: now ${value} ${unit}, at most ${count(most)} in the last minutes`, LEAST_SAMPLES));
  }));
}

const HIDDEN = "This server names its engines to keys with admin only.";
const hidesEngines = (metrics) => metrics.has("yardstick_engines") && !metrics.has("yardstick_engine_requests_in_flight");

function drawEngines(metrics) {
  const seriesOf = (name) => (metrics.get(`yardstick_${name}`) ?? []).slice(0, MAX_ROWS);
  const named = (labels) => labels.state + (labels.model ? ` (${labels.model})` : "");
  const states = seriesOf("engines").map(({ labels, value }) => `${count(value)} ${named(labels)}`);
  const tokens = new Map(seriesOf("engine_tokens_in_flight").map(({ labels, value }) => [labels.engine, value]));
  const rows = seriesOf("engine_requests_in_flight").map(({ labels, value }) =>
    [labels.engine ?? "", count(value), count(tokens.get(labels.engine) ?? 0)]);
  const summary = make("p", { class: "hint", text: `${states.join(", ") || "No engine is known."}${hidesEngines(metrics) ? ` ${HIDDEN}` : ""}` });
  byId("status-engines").replaceChildren(summary, ...(rows.length ? [table(["Engine", "Requests", "Tokens"], rows)] : []));
}

function drawModels(models) {
  const rows = models.map(({ id, parent, context, capabilities, preset }) =>
    [parent ? `${id} (adapter of ${parent})` : id, count(context), capabilities.join(", ").replaceAll("_", " "), preset ? `${preset.name} (${preset.task})` : "none"]);
  drawTable("status-models", ["Model", "Context", "Capabilities", "Preset"], rows, "No model is known.");
}

async function drawCatalogues(signal) {
  let rows = [];
  let hint = "There are no catalogues of registered items.";
  try {
    const { data } = await call("v1/catalogues", { signal });
    rows = data.slice(0, MAX_ROWS).map(({ id, model, items, tokens, bytes }) => [id, model, count(items), count(tokens), count(bytes)]);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    hint = error.text ?? String(error);
  }
  drawTable("status-catalogues", ["Catalogue", "Model", "Items", "Tokens", "Bytes"], rows, hint);
}

function drawItemCaches(metrics, opened) {
  const caches = new Map();
  for (const name of ["tokens", "bytes", "scored_items_total", "found_items_total", "evicted_tokens_total"]) {
    for (const { labels: { engine }, value } of (metrics.get(`yardstick_item_cache_${name}`) ?? []).slice(0, MAX_ROWS)) {
      caches.set(engine, { ...caches.get(engine), [name]: value });
    }
  }
  const rows = [...caches].filter(([, cache]) => cache.scored_items_total > 0).map(([engine, cache]) => {
    if (!opened.has(engine)) opened.set(engine, cache);
    const since = (name) => cache[name] - (cache.scored_items_total > opened.get(engine).scored_items_total ? opened.get(engine)[name] : 0);
    const hits = `${Math.round(100 * since("found_items_total") / since("scored_items_total"))} %`;
    return [engine, count(cache.tokens), count(cache.bytes), hits, count(since("evicted_tokens_total"))];
  });
  drawTable("status-item-caches", ["Engine", "Tokens", "Bytes", "Hit rate", "Evicted tokens"], rows,
    hidesEngines(metrics) ? HIDDEN : "No engine has scored items before queries.");
  const hint = "Hit rate and evictions since the panel was opened; where nothing was scored since, from the engine's start on.";
  if (rows.length) byId("status-item-caches").append(make("p", { class: "hint", text: hint }));
}

function drawLimits() {
  const rows = [...limits].map(([kind, { limit, remaining, reset }]) => {
    const meter = make("meter", { min: 0, max: limit, value: remaining, "aria-label": `Rest of ${kind} a minute` });
    return [kind, `${count(remaining)} of ${count(limit)} a minute`, meter, reset];
  });
  const hint = "The last answers had no limits: the key has none, or nothing was sent yet. Send a request in another panel first.";
  drawTable("status-limits", ["Limit", "Left", "Share", "Whole again in"], rows, hint);
}

function drawTable(id, head, rows, otherwise) {
  byId(id).replaceChildren(rows.length ? table(head, rows) : make("p", { class: "hint", text: otherwise }));
}
