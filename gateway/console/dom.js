// Small helpers to build elements. Text is always set as text, never parsed as markup.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/**
 * Make an element. `properties` are attributes, but `class`, `text`, `data` (an object) and functions named `on…` (listeners).
 * Undefined, null and false leave an attribute out.
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "text") element.textContent = value;
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Show `text` in an element that is hidden while it has none. */
export function say(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

/** A table of texts. `head` and each row are lists of texts or nodes. */
export function table(head, rows) {
  const headings = head.map((text) => make("th", { scope: "col", text }));
  const body = rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))));
  return make("table", {}, make("thead", {}, make("tr", {}, ...headings)), make("tbody", {}, ...body));
}

/** Set the options of a list, pairs of value and text. It keeps its value, or takes it again once it is among them. */
export function setOptions(select, options) {
  const wanted = select.dataset.wanted ?? select.value;
  select.replaceChildren(...options.map(([value, text]) => make("option", { value, text })));
  const known = options.some(([value]) => value === wanted);
  if (known) select.value = wanted;
  if (known || !wanted) delete select.dataset.wanted;
  else select.dataset.wanted = wanted;
}

/** Scroll to an element whose beginning is not on the screen, as results below a form on a phone. */
export function reveal(element) {
  const { top } = element.getBoundingClientRect();
  if (top >= 0 && top < innerHeight * 0.75) return;
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ behavior: still ? "auto" : "smooth", block: "start" });
}

/** Offer `text` to the user as a file. */
export function save(name, text) {
  const url = URL.createObjectURL(new Blob([text]));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const labels = new WeakMap();

/** Copy `text` and say so on the button for a moment. */
export async function copy(button, text) {
  if (!labels.has(button)) labels.set(button, button.textContent);
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(button, text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copying was refused";
  }
  setTimeout(() => { button.textContent = labels.get(button); }, 1500);
}

/** Copy `text` on a page that is neither served by HTTPS nor by this machine: browsers give it no `navigator.clipboard`. */
function copySelected(button, text) {
  const field = make("textarea", { "aria-hidden": "true" });
  field.value = text;
  field.style.position = "fixed"; // the page does not scroll to it
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  button.focus();
  if (!copied) throw new Error("refused");
}

const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

/** A number with separators and at most one decimal. */
export const count = (value) => numbers.format(value);

/** A number and its noun: `1 token`, `2 tokens`. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** Milliseconds as text. */
export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

/** A probability as text. */
export function percent(p) {
  if (p >= 0.9995) return p === 1 ? "100 %" : "99.9+ %";
  if (p < 0.0005) return p > 0 ? "under 0.1 %" : "0 %";
  return p < 0.1 ? `${(p * 100).toFixed(1)} %` : `${Math.round(p * 100)} %`;
}
