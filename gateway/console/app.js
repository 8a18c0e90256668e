// Starts the page: tabs, theme, API key, and the list of models that all panels share.

import { ApiError, apiKey, call, needsKey, signals } from "./api.js";
import { byId, copy, say, setOptions } from "./dom.js";
import { startRank } from "./rank.js";
import { keepFields, linkTo, restore, startOver, stateOf } from "./state.js";
import { startStatus } from "./status.js";
import { startWrite } from "./write.js";

const RETRY_MS = 3000;
const MAX_MODELS = 500;
const DEMO = "yardstick-demo";

/** The served models, and the chosen one. Fires `models` when either changes. */
const served = Object.assign(new EventTarget(), { models: [], model: null });

// --- tabs: https://www.w3.org/WAI/ARIA/apg/patterns/tabs/ with automatic activation

const tabs = [...document.querySelectorAll("[role=tab]")];
const panels = { rank: startRank(served), write: startWrite(served), status: startStatus(served) };
const nameOf = (tab) => tab.id.replace("tab-", "");

function open(tab) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", String(chosen));
    each.tabIndex = chosen ? 0 : -1;
    byId(each.getAttribute("aria-controls")).hidden = !chosen;
    panels[nameOf(each)].shown(chosen);
  }
  document.title = `${tab.textContent} – Yardstick console`;
  history.replaceState(null, "", `#${nameOf(tab)}`);
}

for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (event) => {
    const place = tabs.indexOf(tab);
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: -1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const target = tabs.at(next % tabs.length);
    open(target);
    target.focus();
  });
}

// --- theme

const theme = byId("theme");
theme.value = document.documentElement.dataset.theme ?? "";
theme.addEventListener("change", () => {
  if (theme.value) document.documentElement.dataset.theme = theme.value;
  else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("yardstick.theme", theme.value); } catch { /* the choice lasts until the page is left */ }
});

// --- API key

const dialog = byId("key-dialog");

function askForKey(message = "") {
  byId("key-button").hidden = false;
  byId("key-forget").hidden = !apiKey.get();
  say(byId("key-error"), message);
  if (!dialog.open) dialog.showModal();
}

signals.addEventListener("key", (event) => askForKey(apiKey.get() ? event.detail.text : ""));
byId("key-button").addEventListener("click", () => askForKey());
byId("key-close").addEventListener("click", () => dialog.close());
byId("key-forget").addEventListener("click", () => useKey(""));
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-input").value.trim());
});

async function useKey(key) {
  if (/[^\x21-\x7e]/.test(key)) {
    say(byId("key-error"), "A key has letters, digits and signs only, without spaces.");
    return;
  }
  apiKey.set(key);
  byId("key-input").value = "";
  if (await loadModels()) dialog.close();
}

// --- models

const select = byId("model");
let retry = null;

select.addEventListener("change", () => {
  if (served.models.length) delete select.dataset.wanted;
  choose(select.value);
});
byId("notice-retry").addEventListener("click", loadModels);

function choose(id) {
  served.model = served.models.find((model) => model.id === id) ?? served.models[0] ?? null;
  select.value = served.model?.id ?? "";
  byId("welcome-demo").hidden = served.model?.id !== DEMO;
  served.dispatchEvent(new Event("models"));
}

/** Ask for the models; where there are none yet, ask again later. Returns whether the server answered. */
async function loadModels() {
  clearTimeout(retry);
  let failure = null;
  try {
    served.models = modelsOf(await call("v1/models"));
  } catch (error) {
    served.models = [];
    failure = error;
  }
  setOptions(select, served.models.map(({ id }) => [id, id]));
  select.disabled = !served.models.length;
  choose(select.value);
  byId("key-button").hidden = !needsKey();
  notify(failure);
  if (!failure && !served.models.length) retry = setTimeout(loadModels, RETRY_MS);
  return !failure;
}

function notify(failure) {
  const waiting = "No model is ready yet. An engine may still be loading; this page asks again every few seconds.";
  const text = failure ? failure.text : served.models.length ? "" : waiting;
  say(byId("notice-text"), text);
  byId("notice").hidden = !text;
}

/** Check the answer of /v1/models; fields that are missing get harmless values. */
function modelsOf(answer) {
  if (!Array.isArray(answer?.data)) throw new ApiError("The server's list of models is not one. Does another program answer here?");
  return answer.data.slice(0, MAX_MODELS).filter((model) => typeof model?.id === "string").map((model) => ({
    id: model.id,
    context: Number(model.max_model_len) || 0,
    parent: typeof model.parent === "string" ? model.parent : "",
    capabilities: Array.isArray(model.capabilities) ? model.capabilities.map(String) : [],
    preset: model.preset ?? null,
  }));
}

// --- what the page remembers, and links

const DAMAGED = "The link is damaged, or its page is of another version. The fields are as they were.";
const TOO_LONG = "These fields are too long for a link, which has at most 16,000 characters.";

for (const panel of ["rank", "write"]) {
  const button = byId(`${panel}-link`);
  button.addEventListener("click", async () => {
    const link = await linkTo(panel);
    say(byId("link-note"), link ? "" : TOO_LONG);
    if (link) copy(button, link);
  });
}
byId("start-over").addEventListener("click", startOver);
byId("main").addEventListener("submit", () => say(byId("link-note"), ""));

/** Open the panel that the address names, with the fields of a link. Nothing is sent before the user presses a button. */
async function openNamed() {
  const [name, ...encoded] = location.hash.slice(1).split("=");
  open(tabs.find((tab) => nameOf(tab) === name) ?? tabs[0]);
  if (!encoded.length) return;
  try {
    restore(await stateOf(encoded.join("=")));
    say(byId("link-note"), "The fields are those of the link. Nothing was sent yet.");
  } catch {
    say(byId("link-note"), DAMAGED);
  }
}

byId("welcome").open = !keepFields();
window.addEventListener("hashchange", openNamed);
openNamed();
loadModels();
