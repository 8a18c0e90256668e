// Finds the token ids with which a text is continued after some of its tokens.
//
// The API takes ids, but its log-probabilities name tokens by their text. So the text is tokenised again. Where that gives tokens
// of other texts, as a model may write a word in an unusual way, each such token is looked up by itself. The spelling of each token
// in the vocabulary (`token_strs`) shows which text belongs to which id.

import { call } from "./api.js";

const MAX_LOOKUPS = 16;

/** The conversation that the form asks for. */
export const messagesOf = ({ system, text }) =>
  [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: text }];

/**
 * Return {ids, exact}: the prompt of `settings` and the tokens after it. `exact` is false if some token could not be found by its
 * text; the ids then spell the same text with other tokens.
 */
export async function continuation(settings, tokens, text, signal) {
  const { model, chat, tools } = settings;
  const prompt = chat ? { messages: messagesOf(settings), ...(tools ? { tools } : {}) } : { prompt: settings.text };
  const tokenize = (body) => call("tokenize", { body: { model, ...body }, signal });
  const options = { add_special_tokens: false, parse_special_tokens: false, return_token_strs: true };
  const plain = (part) => tokenize({ prompt: part, ...options });
  const [before, whole] = await Promise.all([tokenize(prompt), plain(text)]);
  const known = new Map();
  learn(known, whole);
  const unknown = [...new Set(tokens.map((token) => token.text))].filter((part) => !known.has(part));
  if (unknown.length <= MAX_LOOKUPS) {
    for (const answer of await Promise.all(unknown.map(plain))) learn(known, answer);
  }
  const ids = tokens.map((token) => known.get(token.text));
  const exact = !ids.includes(undefined);
  return { ids: [...before.tokens, ...(exact ? ids : whole.tokens)], exact };
}

function learn(known, { tokens, token_strs }) {
  token_strs.forEach((spelled, place) => known.set(textOf(spelled), tokens[place]));
}

/** The text of a spelling in a vocabulary: byte-level (`Ġred`), or with marks for spaces and bytes (`▁red`, `<0x0A>`). */
export function textOf(spelled) {
  const byte = /^<0x([0-9A-F]{2})>$/.exec(spelled);
  const codes = byte ? [parseInt(byte[1], 16)] : Array.from(spelled, (character) => BYTE_OF.get(character));
  return codes.includes(undefined) ? spelled.replaceAll("▁", " ") : new TextDecoder().decode(Uint8Array.from(codes));
}

// The alphabet of byte-level vocabularies (GPT-2): printable bytes stand for themselves, the others for U+0100 and following.
const BYTE_OF = new Map();
const isPrintable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
for (let byte = 0, other = 256; byte < 256; byte += 1) BYTE_OF.set(String.fromCodePoint(isPrintable(byte) ? byte : other++), byte);
