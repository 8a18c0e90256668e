// The list of scored documents: one bar each, sorted by score, redrawn at most ten times a second while results arrive; and the lines
// between two such lists.

import { count, counted, duration, make } from "./dom.js";
import { shape, svg } from "./sparkline.js";

const REDRAW_MS = 100;

export class Bars {
  /**
   * A list in `element`, a section with a scale. `view` returns what is shown of it: {top, words}, the number of places (0: all) and
   * a text that documents contain. `drawn` is called after the list was drawn.
   */
  constructor(element, view, drawn) {
    this.list = element.querySelector("ol");
    this.scale = element.querySelector(".scale");
    this.view = view;
    this.drawn = drawn;
    this.begin([]);
  }

  /** Forget the results so far and wait for those of `documents`. */
  begin(documents) {
    this.before = null;
    clearTimeout(this.timer);
    this.timer = null;
    this.documents = documents;
    this.results = new Map(); // by index: {score, ms, usage, cut} or {error}
    this.places = new Map(); // of the documents with scores, by index; the best has 1
    this.shown = []; // indices of the listed documents
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

  /** Mark documents that were cut to fit. */
  cut(indices) {
    for (const index of indices) if (this.results.has(index)) this.results.get(index).cut = true;
  }

  /** Draw what there is now. `before`: the list whose places are compared with those of this one, or null. */
  end(before = null) {
    this.before = before;
    clearTimeout(this.timer);
    this.draw();
  }

  /** Pairs of index and result, the highest score first, failed documents last. */
  get order() {
    return [...this.results.entries()].sort(([a, one], [b, other]) => sortable(other) - sortable(one) || a - b);
  }

  /** The listed results as objects, in the same order. */
  rows() {
    return this.shown.map((index) => {
      const { score, error } = this.results.get(index);
      return { index, score: score ?? null, text: this.documents[index], error: error ?? "" };
    });
  }

  draw() {
    this.timer = null;
    const { order } = this;
    this.places = new Map(order.filter(([, { score }]) => score !== undefined).map(([index], at) => [index, at + 1]));
    const { top, words } = this.view();
    const wanted = order.filter(([index]) => this.documents[index].toLowerCase().includes(words.toLowerCase()));
    const listed = top ? wanted.slice(0, top) : wanted;
    this.shown = listed.map(([index]) => index);
    const scores = [...this.results.values()].map((result) => result.score).filter(Number.isFinite);
    const low = Math.min(0, ...scores);
    const high = Math.max(...scores) <= 1 && low === 0 ? 1 : Math.max(low + 1e-9, 0, ...scores);
    this.list.replaceChildren(...listed.map(([index, result]) => this.row(index, result, low, high)));
    this.scale.hidden = !scores.length;
    this.scale.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((part) => make("span", { text: tick(low + part * (high - low)) })));
    this.drawn();
  }

  row(index, { score, ms, error, usage, cut }, low, high) {
    const text = make("span", { class: "bar-text", text: this.documents[index] });
    if (error !== undefined) return make("li", { class: "failed" }, text, make("span", { class: "error", text: error }));
    const fill = make("span", { class: "bar-fill" });
    fill.style.inlineSize = `${(100 * (score - low)) / (high - low)}%`;
    const place = `Place ${this.places.get(index)}${this.before ? this.moved(index) : ""}`;
    const facts = [place, `document ${index + 1}`, ...(cut ? ["cut to fit"] : []), ...(usage ? [usage] : []), `after ${duration(ms)}`];
    return make("li", {}, text, make("span", { class: "bar-score", text: shown(score) }),
      make("span", { class: "bar-track", "aria-hidden": "true" }, fill),
      make("span", { class: "bar-note", text: facts.join(" · ") }));
  }

  /** The place of a document in the other list, as text. */
  moved(index) {
    const was = this.before.places.get(index);
    if (was === undefined) return "";
    const by = was - this.places.get(index);
    return by ? ` (${by > 0 ? "▲ up" : "▼ down"} ${count(Math.abs(by))} from ${count(was)})` : " (the same)";
  }
}

/** A drawing of the moves between two lists whose rows are of equal height: a line for each document that both show. */
export function movesBetween(left, right) {
  const lines = [];
  const numbers = { up: 0, down: 0, same: 0 };
  for (const [at, index] of right.shown.entries()) {
    const from = left.shown.indexOf(index);
    const by = left.places.get(index) - right.places.get(index);
    if (from < 0 || Number.isNaN(by)) continue;
    const kind = by > 0 ? "up" : by < 0 ? "down" : "same";
    numbers[kind] += 1;
    const [y1, y2] = [[from, left], [at, right]].map(([place, list]) => (100 * (place + 0.5)) / list.shown.length);
    const line = shape("polyline", [`0,${y1.toFixed(2)}`, `100,${y2.toFixed(2)}`]);
    line.setAttribute("class", kind);
    lines.push(line);
  }
  const label = `From the left list to the right one, ${counted(numbers.up, "document")} rise, ${numbers.down} fall, ${numbers.same} keep their place`;
  return svg(100, 100, label, lines);
}

const sortable = (result) => result.score ?? -Number.MAX_VALUE;

const tick = (value) => (Number.isInteger(value) ? String(value) : value.toPrecision(2));

/** Four decimals, or two digits of a very small number. */
function shown(score) {
  if (score !== 0 && Math.abs(score) < 0.00005) return score.toExponential(1);
  return score.toFixed(4);
}
