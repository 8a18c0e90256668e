// Reads server-sent events from the answer to a POST, which EventSource cannot send. Everything is bounded: a server that sends no
// end of a line, no event for long, or events without end is an error and not a page that hangs.

const MAX_EVENT_CHARACTERS = 4 << 20;
const MAX_STREAM_CHARACTERS = 64 << 20;
const SILENCE_SECONDS = 60; // the gateway sends a comment every 15 s while it waits

/** A stream that is not what the API sends, or that ends before `[DONE]`. */
export class BrokenStream extends Error {
  name = "BrokenStream";
}

/** Yield the JSON of each `data:` line until `[DONE]`. `body`, a stream of bytes, is cancelled when the caller stops reading. */
export async function* readEvents(body, { silence = SILENCE_SECONDS } = {}) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let total = 0;
  try {
    for (;;) {
      const { done, value } = await within(silence, reader.read());
      if (done) throw new BrokenStream("The stream ended too early: the server or the connection was lost.");
      const text = decoder.decode(value, { stream: true });
      total += text.length;
      rest += text;
      if (rest.length > MAX_EVENT_CHARACTERS || total > MAX_STREAM_CHARACTERS) {
        throw new BrokenStream("The server sends more than this page reads.");
      }
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.startsWith("data:") ? line.slice(5).trim() : "";
        if (data === "[DONE]") return;
        if (data) yield parsed(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(data) {
  let event;
  try {
    event = JSON.parse(data);
  } catch {
    event = null;
  }
  if (event === null || typeof event !== "object") throw new BrokenStream("The server sent an event that is not JSON.");
  return event;
}

async function within(seconds, promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new BrokenStream(`The server sent nothing for ${seconds} seconds.`)), seconds * 1000);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}
