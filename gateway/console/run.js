// One run of the Write panel: its request, its stream, and what is shown while it writes.

import { ApiError, stream } from "./api.js";
import { continuation, messagesOf } from "./continuation.js";
import { byId, copy, count, counted, duration, make, percent, say } from "./dom.js";
import { Guidance } from "./guidance.js";
import { sparkline } from "./sparkline.js";
import { snapshot } from "./state.js";
import { TokenReader, textBefore } from "./tokens.js";
import { TokenView } from "./token_view.js";

const TOP = 5;
const MAX_TOKENS = 5000; // more than the form allows
const MAX_CALLS = 64;
const REDRAW_MS = 100;
const CHAT = "v1/chat/completions";
const TEXT = "v1/completions";

const ENDS = { length: "token limit", tool_calls: "call of a tool" };

export class Run {
  /**
   * `settings` returns what the form asks for; `changed` is called when the run begins, ends, or would send something else;
   * `remember` is called with what a run wrote.
   */
  constructor(name, settings, changed, remember) {
    this.element = byId("run-template").content.firstElementChild.cloneNode(true);
    this.settings = settings;
    this.changed = changed;
    this.remember = remember;
    this.last = null; // the request that was sent last; null when the form has changed since
    this.abort = null;
    this.tokens = [];
    const find = (selector) => this.element.querySelector(selector);
    find("h3").textContent = name;
    this.name = name;
    this.error = find(".error");
    this.status = find("[role=status]");
    this.figures = find(".figures");
    this.chart = find("figure");
    this.copyButton = find(".copy-text");
    this.copyButton.addEventListener("click", () => copy(this.copyButton, this.text));
    this.guidance = new Guidance(find(".guidance"), `write-${name.replace(" ", "-").toLowerCase()}`, () => {
      this.last = null;
      changed();
    });
    const choose = (place, alternative) => this.continueWith(place, alternative);
    this.callList = find(".calls");
    this.view = new TokenView(find(".tokens"), find(".alternatives"), name, choose);
    this.reset();
  }

  get busy() {
    return this.abort !== null;
  }

  useModel(model) {
    this.last = null;
    this.guidance.allow(Boolean(model?.capabilities.includes("length_guidance")));
  }

  stop() {
    this.abort?.abort();
  }

  /** The request that was sent last, or that the button would send. */
  request() {
    return this.last ?? this.opening(this.settings());
  }

  /** The request for the whole answer. */
  opening(settings) {
    const { text, chat, schema, tools, toolChoice } = settings;
    if (!chat) return this.ask(settings, TEXT, { prompt: text, ...(schema ? { structured_outputs: { json: schema } } : {}) });
    const format = schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {};
    return this.ask(settings, CHAT, { messages: messagesOf(settings), ...format, ...(tools ? { tools, tool_choice: toolChoice } : {}) });
  }

  /** A request with `settings`. `written`: tokens of the answer that the prompt contains already. */
  ask({ model, temperature, maxTokens, seed }, path, prompt, written = 0) {
    const left = Math.max(1, maxTokens - written);
    const chat = { max_completion_tokens: left, logprobs: true, top_logprobs: TOP };
    const limits = path === CHAT ? chat : { max_tokens: left, logprobs: TOP };
    const guidance = this.guidance.field(written);
    const options = { temperature, seed, ...limits, stream: true, stream_options: { include_usage: true } };
    return { path, body: { model, ...prompt, ...options, ...(guidance ? { length_guidance: guidance } : {}) } };
  }

  start() {
    this.reset();
    this.began = this.settings();
    this.write(async () => this.opening(this.began));
  }

  /** Keep the tokens before `place`, put `alternative` there, and let the model write on. */
  continueWith(place, alternative) {
    if (this.busy || !this.began) return;
    const kept = this.tokens.slice(0, place);
    const text = textBefore(this.text, this.tokens[place]) + alternative.text;
    const chosen = { ...this.tokens[place], ...alternative, shown: alternative.text, chosen: true };
    this.reset([...kept, chosen], text);
    this.write(async (signal) => {
      const { ids, exact } = await continuation(this.began, this.tokens, text, signal);
      const notes = [exact ? "" : "The text so far was tokenised again, into other tokens."];
      if (this.began.schema || this.began.tools) notes.push("Continued as plain text, without schema and tools.");
      this.note = notes.filter(Boolean).join(" ");
      const settings = { ...this.settings(), model: this.began.model }; // the ids are of this model
      return this.ask(settings, TEXT, { prompt: ids }, this.tokens.length);
    });
  }

  reset(tokens = [], text = "") {
    this.tokens = tokens;
    this.text = text;
    this.usage = null;
    this.finish = this.note = "";
    this.calls = [];
    say(this.error, "");
    this.view.show(tokens);
    this.drawCalls();
    this.drawFigures(0);
  }

  async write(prepare) {
    this.abort = new AbortController();
    const { signal } = this.abort;
    const clock = performance.now();
    const fields = snapshot("model", "write-");
    this.changed();
    this.status.textContent = `${this.name} is writing.`;
    try {
      this.last = await prepare(signal);
      const reader = new TokenReader(this.text);
      for await (const event of stream(this.last.path, { body: this.last.body, signal })) {
        this.take(reader, event);
        this.drawSoon(clock);
      }
      this.status.textContent = `${this.name} wrote ${counted(this.tokens.length, "token")}.`;
    } catch (error) {
      this.finish = error.name === "AbortError" ? "stopped" : "broken off";
      this.status.textContent = `${this.name}: ${this.finish}.`;
      if (error.name !== "AbortError") say(this.error, error instanceof ApiError ? error.text : String(error));
    } finally {
      this.abort = null;
      this.drawFigures(performance.now() - clock);
      this.view.finish();
      this.drawCalls();
      this.changed();
      this.remember({ run: this.name, fields, text: this.text, calls: this.calls, tokens: this.tokens.length, finish: this.finish });
    }
  }

  take(reader, event) {
    const choice = Array.isArray(event.choices) ? event.choices[0] : null;
    if (event.usage) this.usage = event.usage;
    if (!choice) return;
    const { tokens, text } = reader.read(choice);
    this.text += text;
    this.takeCalls(choice.delta?.tool_calls);
    this.tokens.push(...tokens);
    this.view.add(tokens);
    if (this.tokens.length > MAX_TOKENS) throw new ApiError("The server sends more tokens than were asked for.");
    if (choice.finish_reason) this.finish = ENDS[choice.finish_reason] ?? "end of text";
  }

  /** Add parts of calls of tools, each to the call of its index. */
  takeCalls(parts) {
    for (const { index, function: part } of Array.isArray(parts) ? parts.filter((each) => each?.function) : []) {
      if (!Number.isInteger(index) || index < 0 || index >= MAX_CALLS) continue;
      const call = (this.calls[index] ??= { name: "", arguments: "" });
      call.name += part.name ?? "";
      call.arguments += part.arguments ?? "";
    }
  }

  drawCalls() {
    const calls = this.calls.filter(Boolean).map(({ name, arguments: text }) =>
      make("div", { class: "code" }, make("h4", { text: `Calls ${name}` }), make("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${name}`, text: indented(text) })));
    this.callList.hidden = !calls.length;
    this.callList.replaceChildren(...calls);
  }

  drawSoon(clock) {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      if (this.busy) this.drawFigures(performance.now() - clock);
    }, REDRAW_MS);
  }

  /** Numbers beside the text: tokens, time, mean probability, prediction, end. */
  drawFigures(ms) {
    const logprobs = this.tokens.map((token) => token.logprob).filter(Number.isFinite);
    const predictions = this.tokens.map((token) => token.remaining).filter(Number.isFinite);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const pairs = [["Tokens", count(this.tokens.length)]];
    if (this.busy && predictions.length) {
      pairs.push(["Predicted to come", `about ${counted(Math.round(predictions.at(-1)), "token")}`]);
    }
    const mean = logprobs.reduce((sum, each) => sum + each, 0) / logprobs.length;
    if (logprobs.length) pairs.push(["Mean probability", percent(Math.exp(mean))]); // the geometric mean
    if (ms) pairs.push(["Time", duration(ms)]);
    if (Number.isFinite(this.usage?.prompt_tokens)) {
      const known = Number.isFinite(cached) ? `, ${count(cached)} cached` : "";
      pairs.push(["Prompt", counted(this.usage.prompt_tokens, "token") + known]);
    }
    if (this.finish) pairs.push(["Ended by", this.finish]);
    if (this.note) pairs.push(["Note", this.note]);
    const rows = pairs.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value })));
    this.figures.replaceChildren(...rows);
    this.copyButton.disabled = !this.text;
    this.drawPredictions(predictions);
  }

  /** The predicted length after each token, as a line that falls to zero where the text ends. */
  drawPredictions(predictions) {
    this.chart.hidden = predictions.length < 2;
    if (this.chart.hidden) return;
    const [first, last] = [predictions[0], predictions.at(-1)].map((value) => count(Math.round(value)));
    const label = `Predicted tokens to come, after each token: ${first} at first, ${last} at last`;
    this.chart.replaceChildren(make("figcaption", { class: "hint", text: label }), sparkline(predictions, label));
  }
}

/** JSON with line breaks; other text as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
