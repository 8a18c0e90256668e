// The list of scored documents: one bar each, sorted by score, redrawn at most ten times a second while results arrive.

import { count, counted, duration, make } from "./dom.js";

const REDRAW_MS = 100;

export class Bars {
  constructor(list, scale) {
    this.list = list;
    this.scale = scale;
    this.begin([]);
  }

  /** Forget the results so far and wait for those of `documents`. */
  begin(documents) {
    clearTimeout(this.timer);
    this.timer = null;
    this.documents = documents;
    this.results = new Map(); // by index: {score, ms} or {error}
    this.known = this.failed = 0;
    this.list.replaceChildren();
    this.scale.hidden = true;
  }

  /** Take results, pairs of index and score, that arrived after `ms`. Those that belong to no document are ignored. */
  add(results, ms) {
    for (const [index, score] of results) {
      if (!Number.isInteger(index) || this.documents[index] === undefined || !Number.isFinite(score)) continue;
      if (!this.results.has(index)) this.known += 1;
      this.results.set(index, { score, ms });
    }
    this.timer ??= setTimeout(() => this.draw(), REDRAW_MS);
  }

  /** Take the errors of documents without a score. */
  fail(errors) {
    for (const error of errors) {
      if (this.documents[error?.index] === undefined || this.results.has(error.index)) continue;
      this.results.set(error.index, { error: String(error.message ?? "no reason given") });
      this.failed += 1;
    }
  }

  /** Take the token counts of documents, lists of equal length. */
  use(usage) {
    const places = Array.isArray(usage?.index) ? usage.index : [];
    places.forEach((index, at) => {
      const result = this.results.get(index);
      const [tokens, computed] = [usage.prompt_tokens?.[at], usage.computed_tokens?.[at]];
      if (!result || !Number.isFinite(tokens) || !Number.isFinite(computed)) return;
      result.usage = counted(tokens, "token") + (usage.reused?.[at] === true ? ", from the cache" : `, ${count(computed)} computed`);
    });
  }

  /** Draw what there is now. */
  end() {
    clearTimeout(this.timer);
    this.draw();
  }

  /** Pairs of index and result, the highest score first, failed documents last. */
  get order() {
    return [...this.results.entries()].sort(([a, one], [b, other]) => sortable(other) - sortable(one) || a - b);
  }

  /** The results as objects, in the same order. */
  rows() {
    return this.order.map(([index, { score, error }]) => ({ index, score: score ?? null, text: this.documents[index], error: error ?? "" }));
  }

  draw() {
    this.timer = null;
    const scores = [...this.results.values()].map((result) => result.score).filter(Number.isFinite);
    const low = Math.min(0, ...scores);
    const high = Math.max(...scores) <= 1 && low === 0 ? 1 : Math.max(low + 1e-9, 0, ...scores);
    this.list.replaceChildren(...this.order.map(([index, result]) => this.row(index, result, low, high)));
    this.scale.hidden = !scores.length;
    this.scale.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => make("span", { text: tick(low + part * (high - low)) })));
  }

  row(index, { score, ms, error, usage }, low, high) {
    const text = make("span", { class: "bar-text", text: this.documents[index] });
    if (error !== undefined) return make("li", { class: "failed" }, text, make("span", { class: "error", text: error }));
    const fill = make("span", { class: "bar-fill" });
    fill.style.inlineSize = `${(100 * (score - low)) / (high - low)}%`;
    return make("li", {}, text, make("span", { class: "bar-score", text: shown(score) }),
      make("span", { class: "bar-track", "aria-hidden": "true" }, fill),
      make("span", { class: "bar-note", text: [`Document ${index + 1}`, ...(usage ? [usage] : []), `after ${duration(ms)}`].join(" · ") }));
  }
}

const sortable = (result) => result.score ?? -Number.MAX_VALUE;

const tick = (value) => (Number.isInteger(value) ? String(value) : value.toPrecision(2));

/** Four decimals, or two digits of a very small number. */
function shown(score) {
  if (score !== 0 && Math.abs(score) < 0.00005) return score.toExponential(1);
  return score.toFixed(4);
}
