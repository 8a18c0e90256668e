// Calls of this server's API: addresses, the key, errors, and answers that are bounded in size and time.

import { readEvents } from "./sse.js";

const KEY = "yardstick.key";
const MAX_ANSWER_BYTES = 4 << 20;
const MAX_ERROR_CHARACTERS = 600;
const ANSWER_SECONDS = 30;
const OTHER = "Does another program or a proxy answer at this address?";

/** Fires `key` when the server wants a key (its detail is the error), and `limits` when an answer told limits of the key. */
export const signals = new EventTarget();

/** Limits of the key in the last answer that told any, by kind: {limit, remaining, reset}. */
export const limits = new Map();

/** What went wrong with a call, in words for a person. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, requestId = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfter });
  }

  /** The message with what helps to find the request again. */
  get text() {
    const facts = [
      this.status ? `HTTP ${this.status}` : null,
      this.code,
      this.retryAfter ? `try again in ${this.retryAfter} s` : null,
      this.requestId ? `request ${this.requestId}` : null,
    ].filter(Boolean);
    return facts.length ? `${this.message} (${facts.join(", ")})` : this.message;
  }
}

// The key lives in this tab's session storage, or in memory where the browser forbids storage.
let memory = "";

export const apiKey = {
  get() {
    try { return sessionStorage.getItem(KEY) ?? memory; } catch { return memory; }
  },
  set(value) {
    memory = value;
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch {
      // kept in memory only
    }
  },
};

let asked = false;

/** Whether the server asked for a key since the page was loaded, or one is set. */
export const needsKey = () => asked || Boolean(apiKey.get());

/** Address of a path such as `v1/models`, also behind a proxy that serves the page below a prefix. */
export const addressOf = (path) => new URL(path, document.baseURI).href;

/** Fetch a JSON answer. Throws ApiError, and AbortError where `signal` aborts. */
export async function call(path, { body, signal } = {}) {
  const text = await readText(path, { body, signal });
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(`The server's answer is not JSON. ${OTHER}`);
  }
}

/** Fetch an answer as text of bounded size. */
export async function readText(path, { body, signal } = {}) {
  const limit = AbortSignal.timeout(ANSWER_SECONDS * 1000);
  const response = await send(path, { body, signal: signal ? AbortSignal.any([signal, limit]) : limit });
  return readBounded(response, MAX_ANSWER_BYTES);
}

/** Yield the events of a streamed answer as objects. Throws ApiError, also for a stream that breaks or ends early. */
export async function* stream(path, { body, signal }) {
  const response = await send(path, { body, signal });
  const kind = response.headers.get("content-type") ?? "";
  if (!kind.startsWith("text/event-stream")) throw new ApiError(`The server's answer is not a stream of events. ${OTHER}`);
  try {
    for await (const event of readEvents(response.body)) {
      if (event?.error) throw new ApiError(shortened(event.error.message), { code: event.error.code });
      yield event;
    }
  } catch (error) {
    throw explained(error);
  }
}

async function send(path, { body, signal }) {
  const headers = body === undefined ? {} : { "content-type": "application/json" };
  if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
  const options = { headers, signal, credentials: "omit", redirect: "error" };
  // For a POST, "no-store" would send Cache-Control: no-cache, by which the API computes everything again.
  Object.assign(options, body === undefined ? { cache: "no-store" } : { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(addressOf(path), options);
  } catch (error) {
    throw explained(error);
  }
  noteLimits(response.headers);
  if (!response.ok) throw await refusal(response);
  return response;
}

/** Turn errors of the network into ApiError; a user's own abort stays what it is. */
function explained(error) {
  if (error instanceof ApiError || error.name === "AbortError") return error;
  if (error.name === "TimeoutError") return new ApiError(`The server did not answer within ${ANSWER_SECONDS} seconds.`);
  if (error.name === "BrokenStream") return new ApiError(error.message);
  return new ApiError("The server cannot be reached. Is it running, and is this page's address its own?");
}

async function refusal(response) {
  const headers = response.headers;
  const retryAfter = Number(headers.get("retry-after")) || null;
  const facts = { status: response.status, requestId: headers.get("x-request-id"), retryAfter };
  let told = null;
  try {
    told = JSON.parse(await readBounded(response, 1 << 16)).error;
  } catch {
    // the answer is not one of the API's own
  }
  const known = typeof told?.message === "string";
  const message = known ? shortened(told.message) : "The server refused the request and gave no reason.";
  const error = new ApiError(message, { ...facts, code: typeof told?.code === "string" ? told.code : null });
  if (error.status === 401) {
    asked = true;
    signals.dispatchEvent(new CustomEvent("key", { detail: error }));
  }
  return error;
}

const shortened = (text) => {
  const message = String(text ?? "The server reported an error without a message.");
  return message.length > MAX_ERROR_CHARACTERS ? `${message.slice(0, MAX_ERROR_CHARACTERS)}…` : message;
};

/** Read a body as text of at most `most` bytes. */
export async function readBounded(response, most) {
  const decoder = new TextDecoder();
  let text = "";
  let size = 0;
  try {
    for await (const chunk of chunksOf(response.body)) {
      size += chunk.length;
      if (size > most) throw new ApiError("The server's answer is too large for this page.");
      text += decoder.decode(chunk, { stream: true });
    }
  } catch (error) {
    throw explained(error);
  }
  return text + decoder.decode();
}

/** The chunks of a body; leaving the loop cancels the rest. */
async function* chunksOf(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function noteLimits(headers) {
  let told = false;
  for (const kind of ["requests", "tokens", "items"]) {
    const [limit, remaining] = ["limit", "remaining"].map((what) => headers.get(`x-ratelimit-${what}-${kind}`));
    if (limit === null || remaining === null) continue;
    limits.set(kind, { limit: Number(limit), remaining: Number(remaining), reset: headers.get(`x-ratelimit-reset-${kind}`) ?? "" });
    told = true;
  }
  if (told) signals.dispatchEvent(new Event("limits"));
}
