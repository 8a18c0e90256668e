// Shows tokens coloured by probability, and the alternatives of one of them. The tokens are one stop of the Tab key; arrow keys
// move between them, Enter opens the alternatives, Escape returns.

import { count, make, percent } from "./dom.js";
import { canFollow } from "./tokens.js";

const STEPS = [0.02, 0.1, 0.3, 0.6, 0.9]; // upper ends of the colours p0 to p4; p5 has none
const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export class TokenView {
  /** `choose` is called with the place of a token and the alternative to continue with. */
  constructor(element, alternatives, name, choose) {
    this.element = element;
    this.alternatives = alternatives;
    this.choose = choose;
    this.busy = false;
    element.setAttribute("aria-label", `${name}: tokens. Arrow keys move, Enter shows the alternatives.`);
    element.addEventListener("click", (event) => this.openAt(event.target.closest("[role=button]")));
    element.addEventListener("keydown", (event) => this.key(event));
    alternatives.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
    this.show([]);
  }

  /** Show `tokens` only, as the beginning of a run. */
  show(tokens) {
    this.tokens = [];
    this.current = 0;
    this.busy = true;
    this.element.replaceChildren();
    this.close();
    this.add(tokens);
  }

  add(tokens) {
    for (const token of tokens) {
      this.tokens.push(token);
      this.element.append(spanOf(token));
    }
    if (this.element.firstChild && !this.element.querySelector("[tabindex='0']")) this.element.firstChild.tabIndex = 0;
  }

  /** The run has ended: alternatives can be chosen. */
  finish() {
    this.busy = false;
    if (!this.alternatives.hidden) this.open(this.current, false);
  }

  key(event) {
    const move = MOVES[event.key];
    const place = move ? this.current + move : { Home: 0, End: this.tokens.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.openAt(event.target);
    else if (place === undefined) return;
    else if (this.tokens[place]) this.focus(place);
    event.preventDefault();
  }

  focus(place) {
    const spans = this.element.children;
    spans[this.current].tabIndex = -1;
    this.current = place;
    spans[place].tabIndex = 0;
    spans[place].focus();
  }

  openAt(span) {
    const place = [...this.element.children].indexOf(span);
    if (place < 0) return;
    this.focus(place);
    this.open(place, true);
  }

  open(place, move) {
    const token = this.tokens[place];
    const rows = withChosen(token).map((row) => this.row(place, row, row.text === token.text));
    this.element.querySelector("[aria-current]")?.removeAttribute("aria-current");
    this.element.children[place].setAttribute("aria-current", "true");
    this.alternatives.hidden = false;
    const close = make("button", { type: "button", class: "plain", text: "Close", onclick: () => this.close() });
    const title = make("h4", { text: `Token ${place + 1}: ${visible(token.text)}` });
    const none = make("p", { class: "hint", text: "The server sent no probabilities for this token." });
    const list = rows.length ? make("ul", {}, ...rows) : none;
    this.alternatives.replaceChildren(make("div", { class: "row spread" }, title, close), list);
    if (move) (this.alternatives.querySelector("li button:not(:disabled)") ?? this.alternatives.querySelector("button")).focus();
  }

  row(place, alternative, written) {
    const p = Math.exp(alternative.logprob ?? -Infinity);
    const fill = make("span", { class: "bar-fill" });
    fill.style.inlineSize = `${100 * p}%`;
    const remaining = alternative.remaining === null ? "" : ` · about ${count(Math.round(alternative.remaining))} to come`;
    const use = make("button", { type: "button", disabled: written || this.busy || !canFollow(alternative),
      "aria-label": `Continue with ${visible(alternative.text)}`, text: written ? "Written" : "Continue",
      onclick: () => this.choose(place, alternative) });
    return make("li", { class: written ? "written" : "" }, make("code", { text: visible(alternative.text) }),
      make("span", { class: "bar-track", "aria-hidden": "true" }, fill),
      make("span", { class: "bar-score", text: percent(p) + remaining }), use);
  }

  close() {
    const focused = this.alternatives.contains(document.activeElement);
    this.alternatives.hidden = true;
    this.alternatives.replaceChildren();
    this.element.querySelector("[aria-current]")?.removeAttribute("aria-current");
    if (focused) this.element.children[this.current]?.focus();
  }
}

/** The most probable tokens with the written one, the most probable first. */
function withChosen(token) {
  const rows = token.top.some((row) => row.text === token.text) || token.logprob === null ? token.top : [...token.top, token];
  return [...rows].sort((one, other) => (other.logprob ?? -Infinity) - (one.logprob ?? -Infinity));
}

function spanOf(token) {
  const p = token.logprob === null ? null : Math.exp(token.logprob);
  const step = p === null ? 5 : STEPS.findIndex((end) => p < end); // -1: more probable than all
  const label = `${visible(token.text)}${p === null ? "" : `, ${percent(p)}`}${token.chosen ? ", chosen by you" : ""}`;
  const shown = token.shown.replaceAll("\n", "↵\n");
  const space = shown.trim() ? /^ */.exec(shown)[0] : ""; // spaces before a word get no colour, as they may end a line
  const kind = token.chosen ? "token chosen" : "token";
  return make("span", { class: kind, role: "button", tabindex: "-1", "aria-label": label, title: label },
    space, make("span", { class: `p${step < 0 ? 5 : step}`, text: shown.slice(space.length) }));
}

/** A token's text with its white space visible. */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";
