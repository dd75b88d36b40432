// A text is typed, its labels appear; a label is chosen, the side says why.

import { ask, Failure, setKey } from "./api.js";
import { byId, count, h, number, percent } from "./dom.js";
import * as side from "./panel.js";

const TOP_K = 20;
const TYPING = 180; // ms of rest before the server is asked
const PATIENCE = 400; // ms before waiting is told
const EXAMPLE = 70; // letters of an example that are shown

const state = { info: null, found: [], asked: "", asking: null, looking: null, timer: 0 };

// ---- trouble

let retry = 0;

function trouble(error, again) {
  clearTimeout(retry);
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
    tell("");
    return;
  }
  const box = byId("trouble");
  const seconds = error.retryAfter ?? (error.status === 0 ? 3 : undefined);
  const later = seconds ? ` Trying again in ${seconds} s.` : "";
  const words = { 429: "The server is busy.", 503: "The server is not ready." }[error.status] ?? error.message;
  box.replaceChildren(words + later,
    h("button", { type: "button", onclick: () => { calm(); again(); } }, "Try now"));
  box.hidden = false;
  tell("");
  if (seconds) retry = setTimeout(again, 1000 * seconds);
}

function calm() {
  clearTimeout(retry);
  byId("trouble").hidden = true;
}

const tell = (text) => { byId("status").textContent = text; };

// ---- labels of the text

const threshold = () => Number(byId("threshold").value);
const worth = (label) => label.probability ?? label.score;
const shown = (label) =>
  label.probability === undefined ? number(label.score) : percent(label.probability);

// What decisions at this threshold were worth on texts held out of training, if that is known.
function odds(lowest) {
  const known = state.info?.decisions;
  if (!known) return "";
  const place = known.thresholds.findIndex((value) => value >= lowest - 1e-9);
  const [right, found] = [known.precision[place], known.recall[place]];
  if (place < 0 || !found) return "No label of the held-out texts was so probable.";
  return `Of held-out texts: ${percent(right)} of the labels shown were right, ${percent(found)} of the right ones were shown.`;
}

function showLabels() {
  const best = Math.max(1, ...state.found.map(worth));
  const chosen = location.hash.match(/^#why\/(\d+)$/)?.[1];
  const lowest = threshold();
  const kept = state.found.filter((label) => worth(label) >= lowest).length;
  const rows = state.found.map((label, i) => {
    const row = side.row({
      title: label.label,
      score: shown(label),
      share: worth(label) / best,
      href: side.hrefs.why(label.id),
      "data-id": label.id,
      "aria-current": String(label.id) === chosen ? "true" : null,
    });
    if (i >= kept) row.classList.add("below");
    return row;
  });
  if (kept < rows.length) {
    const told = kept ? "below the threshold" : "none reaches the threshold";
    rows.splice(kept, 0, h("li", { class: "rule" }, told));
  }
  byId("labels").replaceChildren(...rows);
  byId("threshold-value").textContent = state.info?.decisions ? percent(lowest) : lowest.toFixed(2);
  byId("odds").textContent = odds(lowest);
  return kept;
}

function scale() {
  // scores that are no probabilities may exceed 1
  const best = state.found.length ? worth(state.found[0]) : 1;
  const slider = byId("threshold");
  if (best > Number(slider.max)) slider.max = Math.ceil(best);
}

async function predict() {
  const text = byId("text").value;
  state.asking?.abort();
  if (!text.trim()) {
    state.found = [];
    state.asked = "";
    byId("labels").replaceChildren();
    byId("labels").classList.remove("waiting");
    byId("hint").hidden = false;
    tell("");
    calm();
    return;
  }
  const most = state.info?.limits.max_text ?? Infinity;
  if ([...text].length > most) {
    tell(`The text is longer than ${count(most)} characters, the most this server takes.`);
    return;
  }
  const asking = new AbortController();
  state.asking = asking;
  const patience = setTimeout(() => {
    tell("Waiting for the server …");
    byId("labels").classList.add("waiting");
  }, PATIENCE);
  const start = performance.now();
  try {
    const [found] = await ask("predict", {
      body: { inputs: [text], top_k: TOP_K },
      signal: asking.signal,
    });
    calm();
    state.found = found;
    state.asked = text;
    scale();
    const kept = showLabels();
    byId("hint").hidden = true;
    const ms = Math.round(performance.now() - start);
    tell(found.length ? `${kept} of the best ${found.length} labels · ${ms} ms` : "No label fits this text.");
    if (location.hash.startsWith("#why/")) look();
  } catch (error) {
    if (error.name !== "AbortError") trouble(error, predict);
  } finally {
    clearTimeout(patience);
    if (state.asking === asking) byId("labels").classList.remove("waiting");
  }
}

// ---- the side

async function look() {
  state.looking?.abort();
  const looking = new AbortController();
  state.looking = looking;
  const [, view, id, member = "0"] = location.hash.match(/^#(why|label|cluster)\/(\d+)(?:\/(\d+))?$/) ?? [];
  for (const row of document.querySelectorAll("#labels .bar-row")) {
    const current = view === "why" && row.dataset.id === id;
    if (current) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
  if (!view || (view === "why" && !state.asked)) {
    side.clear();
    return;
  }
  try {
    if (view === "why") await side.why(state.asked, Number(id), state.info?.n_members ?? 1, looking.signal);
    else await side[view](Number(id), Number(member), looking.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Failure)) throw error;
    if (error.status === 401) trouble(error, look);
    side.fail(error);
  }
}

function bringIntoView() {
  const narrow = matchMedia("(max-width: 52rem)").matches;
  if (narrow && location.hash.length > 1) byId("side").scrollIntoView({ behavior: "smooth" });
  else byId("side").scrollTop = 0;
}

let finding;

async function find() {
  const query = byId("query").value.trim();
  const hits = byId("hits");
  finding?.abort();
  if (!query) {
    hits.hidden = true;
    return;
  }
  finding = new AbortController();
  try {
    const path = `labels?limit=8&q=${encodeURIComponent(query.slice(0, 200))}`;
    const { labels } = await ask(path, { signal: finding.signal });
    hits.replaceChildren(...labels.map((label) => side.row({
      title: label.label,
      score: label.frequency === null ? "" : count(label.frequency),
      href: side.hrefs.label(label.id),
    })));
    if (!labels.length) hits.append(h("li", {}, h("p", { class: "soft" }, "No label has that in its name.")));
    hits.hidden = false;
  } catch (error) {
    if (error.name !== "AbortError") trouble(error, find);
  }
}

// ---- keys

function walk(event, list) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const rows = [...list.querySelectorAll(".bar-row")];
  const next = rows.indexOf(document.activeElement) + step;
  if (next < 0 || next >= rows.length) return;
  event.preventDefault();
  rows[next].focus();
}

function listen() {
  byId("text").addEventListener("input", () => {
    clearTimeout(state.timer);
    state.timer = setTimeout(predict, TYPING);
  });
  byId("threshold").addEventListener("input", () => {
    const kept = showLabels();
    if (state.found.length) tell(`${kept} of the best ${state.found.length} labels`);
  });
  byId("query").addEventListener("input", () => {
    clearTimeout(state.timer);
    state.timer = setTimeout(find, TYPING);
  });
  byId("find").addEventListener("submit", (event) => {
    event.preventDefault();
    byId("hits").querySelector("button")?.click();
  });
  byId("query").addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown") return;
    event.preventDefault();
    byId("hits").querySelector("button")?.focus();
  });
  for (const id of ["labels", "hits", "panel"]) {
    byId(id).addEventListener("keydown", (event) => walk(event, byId(id)));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && location.hash) side.close();
  });
  addEventListener("hashchange", async () => {
    byId("hits").hidden = true;
    await look();
    bringIntoView();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    byId("key-form").hidden = true;
    start();
  });
}

// ---- the beginning

function offer(examples) {
  byId("examples").replaceChildren(...examples.map((text) => {
    const shown = text.length > EXAMPLE ? `${text.slice(0, EXAMPLE - 1)}…` : text;
    const use = () => {
      byId("text").value = text;
      predict();
    };
    return h("button", { type: "button", title: text, onclick: use }, shown);
  }));
}

async function start() {
  try {
    const [info, { examples }] = await Promise.all([ask("info"), ask("examples")]);
    state.info = info;
    calm();
    const members = info.n_members > 1 ? ` · ${info.n_members} members` : "";
    byId("about").textContent =
      `${info.model} · ${count(info.n_labels)} labels in ${count(info.n_clusters)} clusters${members}`;
    document.title = `${info.model} · ELIAS`;
    if (info.decisions) byId("threshold").value = info.decisions.f1;
    showLabels();
    offer(examples);
    if (byId("text").value.trim()) predict();
    look();
  } catch (error) {
    trouble(error, start);
  }
}

listen();
start();
