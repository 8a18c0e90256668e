// The Status panel: engines, queues, rates, models and limits, sampled from /metrics while the panel is open.

import { call, limits, readText, signals } from "./api.js";
import { byId, count, counted, make, say, table } from "./dom.js";
import { histograms, parseMetrics, quantile, Series, since, sum, totalOf } from "./metrics.js";
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
  let opened = new Map(); // what item caches and histograms had counted when the panel was opened

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
      drawLatency(metrics, opened);
      drawTextWorkers(metrics, opened);
      drawUsage(metrics);
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
  const grammars = new Map(seriesOf("grammar_queue").map(({ labels, value }) => [labels.engine, value]));
  const rows = seriesOf("engine_requests_in_flight").map(({ labels: { engine = "" }, value }) =>
    [engine, count(value), count(tokens.get(engine) ?? 0), grammars.has(engine) ? count(grammars.get(engine)) : "–"]);
  const summary = make("p", { class: "hint", text: `${states.join(", ") || "No engine is known."}${hidesEngines(metrics) ? ` ${HIDDEN}` : ""}` });
  byId("status-engines").replaceChildren(summary, ...(rows.length ? [table(["Engine", "Requests", "Tokens", "Grammars to compile"], rows)] : []));
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

/** Shares of a histogram as texts, of what it counted since the panel was opened. */
function sharesOf(opened, name, key, buckets, shares) {
  const id = `${name} ${key}`;
  if (!opened.has(id)) opened.set(id, buckets);
  const counted = since(buckets, opened.get(id));
  return { total: totalOf(counted), times: shares.map((share) => (totalOf(counted) ? seconds(quantile(counted, share)) : "–")) };
}

const seconds = ({ value, above }) =>
  `${above ? "over " : ""}${value < 1 ? `${Number((value * 1000).toPrecision(2))} ms` : `${Number(value.toPrecision(2))} s`}`;

function drawLatency(metrics, opened) {
  const firsts = histograms(metrics, "first_byte_seconds", (labels) => labels.stream === "true");
  const rows = [...histograms(metrics, "request_seconds", isApi)].slice(0, MAX_ROWS).map(([key, buckets]) => {
    const { route, model } = JSON.parse(key);
    const [first] = [...firsts].filter(([other]) => JSON.parse(other).route === route && JSON.parse(other).model === model);
    const whole = sharesOf(opened, "request_seconds", key, buckets, [0.5, 0.95, 0.99]);
    const begun = first ? sharesOf(opened, "first_byte_seconds", ...first, [0.5, 0.95]).times : ["–", "–"];
    return [whole.total, [route ?? "", model ?? "", count(whole.total), ...whole.times, ...begun]];
  });
  rows.sort(([one], [other]) => other - one);
  drawTable("status-latency", ["Endpoint", "Model", "Requests", "Median", "95 %", "99 %", "Stream begins, median", "95 %"],
    rows.map(([, cells]) => cells), "Nothing was answered yet.");
}

function drawTextWorkers(metrics, opened) {
  const rows = [["Waiting now", counted(sum(metrics, "text_queue"), "request"), "", ""]];
  for (const [title, name] of [["Wait for a worker", "text_wait_seconds"], ["Work on a request", "text_seconds"]]) {
    const [histogram] = histograms(metrics, name);
    if (histogram) rows.push([title, ...sharesOf(opened, name, ...histogram, [0.5, 0.95, 0.99]).times]);
  }
  const ended = (metrics.get("yardstick_text_workers_ended_total") ?? []).slice(0, MAX_ROWS);
  rows.push(["Ended, since the start", ended.map(({ labels, value }) => `${count(value)} ${labels.reason}`).join(", ") || "none", "", ""]);
  drawTable("status-text", ["Text workers", "Median", "95 %", "99 %"], rows, "");
}

function drawUsage(metrics) {
  const of = (name, key, kind) => sum(metrics, name, (labels) => labels.key === key && (kind === undefined || labels.kind === kind));
  const rows = (metrics.get("yardstick_key_requests_total") ?? []).slice(0, MAX_ROWS).map(({ labels: { key = "" }, value }) => [value, [key,
    count(value), count(of("key_items_total", key)), ...["prompt", "prompt_cached", "completion"].map((kind) => count(of("key_tokens_total", key, kind))),
    count(of("limited_total", key))]]);
  rows.sort(([one], [other]) => other - one);
  drawTable("status-usage", ["Key", "Requests", "Items", "Prompt tokens", "Cached", "Written tokens", "Refused at limits"],
    rows.map(([, cells]) => cells), hidesEngines(metrics) ? "This server names keys to keys with admin only." : NO_USAGE);
}

const NO_USAGE = "No use of a key is counted: the setting usage_keys is 0, or none was used yet.";

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
