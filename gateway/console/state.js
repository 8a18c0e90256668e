// What the page remembers: controls marked `data-kept`, in the local storage of the browser and in links. The API key is none of them.

import { readBounded } from "./api.js";

const STORE = "yardstick.console";
const MAX_CHARACTERS = 1_500_000; // of a state: the documents of one request, and the other fields
const MAX_LINK_CHARACTERS = 16_000;
const SAVE_MS = 300;

let timer = null; // until the fields are stored

const nameOf = (control) => control.name || control.id;

/** The values of the kept controls by name; of those whose names begin with one of `prefixes` only. */
export function snapshot(...prefixes) {
  const state = {};
  for (const control of document.querySelectorAll("[data-kept]")) {
    if (prefixes.length && !prefixes.some((prefix) => nameOf(control).startsWith(prefix))) continue;
    if (control.type === "checkbox") state[nameOf(control)] = control.checked;
    else if (control.type !== "radio" || control.checked) state[nameOf(control)] = control.dataset.wanted ?? control.value;
  }
  return state;
}

/**
 * Put the values of `state`, which may be anybody's, into the kept controls, as if the user had. Other names and values of wrong
 * types are ignored. A list that does not have its value yet takes it later (`setOptions`).
 */
export function restore(state) {
  for (const control of document.querySelectorAll("[data-kept]")) {
    const value = Object.hasOwn(state, nameOf(control)) ? state[nameOf(control)] : null;
    if (control.type === "checkbox" && typeof value === "boolean") control.checked = value;
    else if (control.type === "checkbox" || typeof value !== "string" || value.length > MAX_CHARACTERS) continue;
    else if (control.type === "radio") control.checked = control.value === value;
    else if (control.tagName !== "SELECT") control.value = value;
    else if ([...control.options].some((option) => option.value === value)) control.value = value;
    else if (!control.options.length) control.dataset.wanted = value;
    else continue;
    for (const kind of ["input", "change"]) control.dispatchEvent(new Event(kind, { bubbles: true }));
  }
}

/** A value of local storage, or null: storage may be forbidden, and its content is anybody's who could write it. */
export function stored(name) {
  try {
    const value = JSON.parse(localStorage.getItem(name));
    return value !== null && typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}

/** Store a value; one that finds no room is removed, so that no older one returns. Returns whether it is stored. */
export function store(name, value, most = MAX_CHARACTERS) {
  const text = JSON.stringify(value);
  try {
    localStorage.removeItem(name);
    if (text.length <= most) localStorage.setItem(name, text);
    return text.length <= most;
  } catch {
    return false;
  }
}

/** Restore the fields of the last visit, and keep them from now on. Returns whether there were any. */
export function keepFields() {
  const before = stored(STORE);
  if (before) restore(before);
  const save = () => {
    clearTimeout(timer);
    timer = null;
    store(STORE, snapshot());
  };
  for (const kind of ["input", "change"]) document.addEventListener(kind, () => { timer ??= setTimeout(save, SAVE_MS); });
  addEventListener("pagehide", () => timer && save());
  return before !== null;
}

/** Remove everything that the page has stored but the theme and the key, and show the page as on a first visit. */
export function startOver() {
  clearTimeout(timer);
  timer = null;
  try {
    for (const name of Object.keys(localStorage)) if (name.startsWith(STORE)) localStorage.removeItem(name);
  } catch {
    // nothing is stored
  }
  location.reload();
}

/** The address of this page with the values of a panel's controls, or "" if it would be too long. */
export async function linkTo(panel) {
  const text = JSON.stringify(snapshot("model", `${panel}-`));
  const packed = new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(packed).arrayBuffer());
  if (bytes.length > MAX_LINK_CHARACTERS) return "";
  const encoded = btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  return encoded.length > MAX_LINK_CHARACTERS ? "" : `${location.href.split("#")[0]}#${panel}=${encoded}`;
}

/** The state of the part of a link after `=`, which may be anybody's. Throws where it is none; what it unpacks to is bounded. */
export async function stateOf(encoded) {
  if (encoded.length > MAX_LINK_CHARACTERS) throw new RangeError("too long");
  const bytes = Uint8Array.from(atob(encoded.replaceAll("-", "+").replaceAll("_", "/")), (character) => character.charCodeAt(0));
  const whole = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const state = JSON.parse(await readBounded(new Response(whole), MAX_CHARACTERS));
  if (state === null || typeof state !== "object") throw new TypeError("not an object");
  return state;
}
