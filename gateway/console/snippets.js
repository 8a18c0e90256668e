// Shows a request as a curl command and as Python code of OpenAI's SDK, with a variable in place of the key.

import { addressOf, needsKey } from "./api.js";
import { byId, copy, make } from "./dom.js";

const MAX_SHOWN_CHARACTERS = 20_000;
const SDK_FIELDS = new Set(["model", "messages", "prompt", "temperature", "max_tokens", "max_completion_tokens", "seed", "logprobs",
  "top_logprobs", "stream", "stream_options", "response_format", "tools", "tool_choice"]);

/** A block with two views and a copy button in the element `id`. Returns a function that shows a request {path, body}, and whose. */
export function codeBlock(id) {
  const code = make("code");
  const block = make("pre", { tabindex: "0", role: "region", "aria-label": "Code of this request" }, code);
  const button = make("button", { type: "button", class: "plain", text: "Copy", onclick: () => copy(button, code.textContent) });
  const choices = ["curl", "Python"].map((name) =>
    make("button", { type: "button", text: name, "aria-pressed": String(name === "curl"), onclick: () => choose(name) }));
  const languages = make("div", { class: "segments", role: "group", "aria-label": "Language" }, ...choices);
  const title = make("h3", { text: "This request as code" });
  byId(id).append(make("div", { class: "row spread" }, title, make("div", { class: "row" }, languages, button)), block);
  let request = null;
  let language = "curl";
  const draw = () => {
    if (request) code.textContent = shortened((language === "curl" ? curl : python)(request));
  };
  function choose(name) {
    language = name;
    for (const choice of choices) choice.setAttribute("aria-pressed", String(choice.textContent === name));
    draw();
  }
  return (shown, whose = "") => {
    request = shown;
    title.textContent = `This request as code${whose && `: ${whose}`}`;
    draw();
  };
}

const shortened = (text) =>
  text.length > MAX_SHOWN_CHARACTERS ? `${text.slice(0, MAX_SHOWN_CHARACTERS)}\n… (the request is too long to be shown)` : text;

/** The request as a command for a POSIX shell. */
export function curl({ path, body }) {
  const lines = [`curl ${body?.stream ? "-N " : ""}${addressOf(path)}`];
  if (needsKey()) lines.push('-H "authorization: Bearer $YARDSTICK_API_KEY"');
  if (body) lines.push("-H 'content-type: application/json'", `-d ${quoted(literal(body, { words: JSON_WORDS }))}`);
  return lines.join(" \\\n  ");
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** The request as a Python program. */
export function python({ path, body }) {
  const key = needsKey() ? 'os.environ["YARDSTICK_API_KEY"]' : '"none"';
  const imports = `${needsKey() ? "import os\n\n" : ""}from openai import OpenAI\n\n`;
  const head = `${imports}client = OpenAI(base_url=${JSON.stringify(addressOf("v1"))}, api_key=${key})\n`;
  if (path === "v1/models") return `${head}for model in client.models.list():\n    print(model.id)`;
  if (path === "v1/chat/completions") return head + created("client.chat.completions", body, "chunk.choices[0].delta.content");
  if (path === "v1/completions") return head + created("client.completions", body, "chunk.choices[0].text");
  const { stream: _, partial_results: __, ...whole } = body;
  const post = `answer = client.post(${JSON.stringify(path.replace(/^v1/, ""))}, cast_to=object, body=body)`;
  return [`${head}body = ${literal(whole)}`, post, ...PRINTS[path]].join("\n");
}

const PRINTS = {
  "v1/rerank": [
    'for result in answer["results"]:',
    "    print(f'{result[\"relevance_score\"]:.4f}', body[\"documents\"][result[\"index\"]])",
  ],
  "v1/score": ['for item, scores in zip(body["items"], answer["scores"]):', "    print(scores, item)"],
};

function created(method, body, text) {
  const fields = Object.entries(body);
  const others = Object.fromEntries(fields.filter(([name]) => !SDK_FIELDS.has(name)));
  const known = fields.filter(([name]) => SDK_FIELDS.has(name));
  if (Object.keys(others).length) known.push(["extra_body", others]);
  const given = known.filter(([, value]) => value !== undefined);
  const lines = given.map(([name, value]) => `    ${name}=${literal(value, { depth: 1 })},`);
  const print = ["for chunk in stream:", "    if chunk.choices:", `        print(${text} or "", end="", flush=True)`];
  return [`stream = ${method}.create(`, ...lines, ")", ...print].join("\n");
}

/** A value as JSON or as a Python literal. Short lists and objects are on one line. Strings of JSON are strings of Python too. */
function literal(value, { depth = 0, words = PYTHON } = {}) {
  if (value === undefined || value === null || typeof value === "boolean") return words[String(value ?? null)];
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const entries = list ? value : Object.entries(value).filter(([, part]) => part !== undefined);
  const inner = (part) => literal(part, { depth: depth + 1, words });
  const parts = entries.map((part) => (list ? inner(part) : `${JSON.stringify(part[0])}: ${inner(part[1])}`));
  const [open, close] = list ? "[]" : "{}";
  const short = parts.join(", ");
  const flat = parts.every((part) => !part.includes("\n"));
  if (flat && (short.length < 80 || (list && value.every(Number.isInteger)))) return open + short + close;
  const indent = words.indent.repeat(depth);
  return `${open}\n${parts.map((part) => indent + words.indent + part).join(",\n")}\n${indent}${close}`;
}

const PYTHON = { true: "True", false: "False", null: "None", indent: "    " };
const JSON_WORDS = { true: "true", false: "false", null: "null", indent: "  " };
