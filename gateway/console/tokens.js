// Reads tokens from the events of both generating endpoints.
//
// A token is {text, shown, logprob, remaining, start, top}: its text; the text that it adds to the screen (a part of a character
// adds nothing until the character is complete); its log-probability, null if unknown; the predicted tokens after it; its place in
// the text of the answer, in characters; and the most probable tokens at its place, each {text, logprob, remaining}.

const PARTIAL = "\ufffd";
const MAX_TOP = 20;

const CONTROL = /^<(\|.*\||\/?s|eos|bos|pad|unk|(start|end)_of_turn)>$/;

/** Whether a text can go on with this token: parts of characters cannot be sent as text, and a control token ends it. */
export const canFollow = (token) => token.text !== "" && !token.text.includes(PARTIAL) && !CONTROL.test(token.text);

/** The text of an answer before one of its tokens. */
export const textBefore = (text, token) => [...text].slice(0, token.start).join("");

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

export class TokenReader {
  /** `before`: text of the answer that the prompt contains already. */
  constructor(before) {
    this.base = [...before].length;
    this.seen = 0; // characters of the answer read so far
    this.decoder = new TextDecoder();
  }

  /** Return the tokens and the text that one choice of an event adds. */
  read(choice) {
    const text = String(choice.delta?.content ?? choice.text ?? "");
    const logprobs = choice.logprobs;
    if (Array.isArray(logprobs?.content)) return { text, tokens: logprobs.content.map((entry) => this.ofChat(entry)) };
    if (Array.isArray(logprobs?.tokens)) return { text, tokens: logprobs.tokens.map((_, place) => this.ofText(logprobs, place)) };
    return { text, tokens: text ? [this.plain(text)] : [] };
  }

  ofChat(entry) {
    const text = String(entry?.token ?? "");
    const start = this.base + this.seen;
    const bytes = Array.isArray(entry?.bytes) ? Uint8Array.from(entry.bytes) : new TextEncoder().encode(text);
    const shown = this.decoder.decode(bytes, { stream: true });
    this.seen += [...shown].length;
    const rows = Array.isArray(entry?.top_logprobs) ? entry.top_logprobs.slice(0, MAX_TOP) : [];
    const textOf = (row) => String(row?.token ?? "");
    const top = rows.map((row) => ({ text: textOf(row), logprob: number(row?.logprob), remaining: number(row?.remaining_tokens) }));
    return { text, shown, start, logprob: number(entry?.logprob), remaining: number(entry?.remaining_tokens), top };
  }

  ofText(logprobs, place) {
    const text = String(logprobs.tokens[place]);
    const remaining = logprobs.top_remaining_tokens?.[place] ?? {};
    const rows = Object.entries(logprobs.top_logprobs?.[place] ?? {}).slice(0, MAX_TOP + 1);
    const top = rows.map(([name, logprob]) => ({ text: name, logprob: number(logprob), remaining: number(remaining[name]) }));
    const start = this.base + (number(logprobs.text_offset?.[place]) ?? this.seen);
    this.seen += [...text].length;
    return { text, shown: text, start, logprob: number(logprobs.token_logprobs?.[place]), remaining: number(remaining[text]), top };
  }

  plain(text) {
    const start = this.base + this.seen;
    this.seen += [...text].length;
    return { text, shown: text, start, logprob: null, remaining: null, top: [] };
  }
}
