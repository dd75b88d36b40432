// Predict labels while a text is typed; explain the selected label in the side panel.

import { ApiError, request, setKey } from "./api.js";
import { byId, count, h, number, percent } from "./dom.js";
import * as side from "./panel.js";

const TOP_K = 20;
const TYPING_DELAY = 180; // ms without typing before a request is sent
const WAITING_DELAY = 400; // ms before the page says that it waits
const EXAMPLE_LENGTH = 70; // letters shown of an example

const state = { info: null, labels: [], text: "", pending: null, panelRequest: null, timer: 0 };

// ---- errors

let retry = 0;

function showError(error, again) {
  clearTimeout(retry);
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
    setStatus("");
    return;
  }
  const box = byId("error");
  const seconds = error.retryAfter ?? (error.status === 0 ? 3 : undefined);
  const later = seconds ? ` Trying again in ${seconds} s.` : "";
  const message = { 429: "The server is busy.", 503: "The server is not ready." }[error.status] ?? error.message;
  box.replaceChildren(message + later,
    h("button", { type: "button", onclick: () => { clearError(); again(); } }, "Retry now"));
  box.hidden = false;
  setStatus("");
  if (seconds) retry = setTimeout(again, 1000 * seconds);
}

function clearError() {
  clearTimeout(retry);
  byId("error").hidden = true;
}

const setStatus = (text) => { byId("status").textContent = text; };

// ---- labels

const threshold = () => Number(byId("threshold").value);
const rankValue = (label) => label.probability ?? label.score;
const shown = (label) =>
  label.probability === undefined ? number(label.score) : percent(label.probability);

// Return precision and recall at this threshold on held-out texts, if known.
function quality(limit) {
  const decisions = state.info?.decisions;
  if (!decisions) return "";
  const index = decisions.thresholds.findIndex((value) => value >= limit - 1e-9);
  const [precision, recall] = [decisions.precision[index], decisions.recall[index]];
  if (index < 0 || !recall) return "On held-out texts no label reached this probability.";
  return `On held-out texts at this threshold: precision ${percent(precision)}, recall ${percent(recall)}.`;
}

function showLabels() {
  const best = Math.max(1, ...state.labels.map(rankValue));
  const chosen = location.hash.match(/^#why\/(\d+)$/)?.[1];
  const limit = threshold();
  const nAbove = state.labels.filter((label) => rankValue(label) >= limit).length;
  const rows = state.labels.map((label, i) => {
    const row = side.row({
      title: label.label,
      score: shown(label),
      share: rankValue(label) / best,
      href: side.hrefs.why(label.id),
      "data-id": label.id,
      "aria-current": String(label.id) === chosen ? "true" : null,
    });
    if (i >= nAbove) row.classList.add("below");
    return row;
  });
  if (nAbove < rows.length) {
    const note = nAbove ? "below the threshold" : "no label reaches the threshold";
    rows.splice(nAbove, 0, h("li", { class: "rule" }, note));
  }
  // New rows must not take the focus away from a keyboard user.
  const focused = document.activeElement.closest("#labels .bar-row")?.dataset.id;
  byId("labels").replaceChildren(...rows);
  if (focused) byId("labels").querySelector(`[data-id="${focused}"]`)?.focus();
  byId("threshold-value").textContent = state.info?.decisions ? percent(limit) : limit.toFixed(2);
  byId("quality").textContent = quality(limit);
  return nAbove;
}

function scale() {
  // Scores that are not probabilities may exceed 1.
  const best = state.labels.length ? rankValue(state.labels[0]) : 1;
  const slider = byId("threshold");
  if (best > Number(slider.max)) slider.max = Math.ceil(best);
}

async function predict() {
  const text = byId("text").value;
  state.pending?.abort();
  if (!text.trim()) {
    state.labels = [];
    state.text = "";
    byId("labels").replaceChildren();
    byId("labels").classList.remove("waiting");
    byId("hint").hidden = false;
    setStatus("");
    clearError();
    return;
  }
  const maxLength = state.info?.limits.max_text ?? Infinity;
  if ([...text].length > maxLength) {
    setStatus(`The text is longer than ${count(maxLength)} characters, the limit of this server.`);
    return;
  }
  const pending = new AbortController();
  state.pending = pending;
  const waiting = setTimeout(() => {
    setStatus("Waiting for the server …");
    byId("labels").classList.add("waiting");
  }, WAITING_DELAY);
  const start = performance.now();
  try {
    const [labels] = await request("predict", {
      body: { inputs: [text], top_k: TOP_K },
      signal: pending.signal,
    });
    clearError();
    state.labels = labels;
    state.text = text;
    scale();
    const nAbove = showLabels();
    byId("hint").hidden = true;
    const ms = Math.round(performance.now() - start);
    setStatus(labels.length ? `${nAbove} of the best ${labels.length} labels · ${ms} ms` : "No label fits this text.");
    if (location.hash.startsWith("#why/")) showPanel();
  } catch (error) {
    if (error.name !== "AbortError") showError(error, predict);
  } finally {
    clearTimeout(waiting);
    if (state.pending === pending) byId("labels").classList.remove("waiting");
  }
}

// ---- side panel

async function showPanel() {
  state.panelRequest?.abort();
  const panelRequest = new AbortController();
  state.panelRequest = panelRequest;
  const [, view, id, member = "0"] = location.hash.match(/^#(why|label|cluster)\/(\d+)(?:\/(\d+))?$/) ?? [];
  for (const row of document.querySelectorAll("#labels .bar-row")) {
    const current = view === "why" && row.dataset.id === id;
    if (current) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
  if (!view || (view === "why" && !state.text)) {
    side.clear(state.info);
    return;
  }
  try {
    if (view === "why") await side.why(state.text, Number(id), state.info, panelRequest.signal);
    else await side[view](Number(id), Number(member), state.info, panelRequest.signal);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) showError(error, showPanel);
    side.fail(error);
  }
}

function scrollToPanel() {
  const narrow = matchMedia("(max-width: 52rem)").matches;
  if (narrow && location.hash.length > 1) byId("side").scrollIntoView({ behavior: "smooth" });
  else byId("side").scrollTop = 0;
}

let search;

async function findLabels() {
  const query = byId("query").value.trim();
  const hits = byId("hits");
  search?.abort();
  if (!query) {
    hits.hidden = true;
    return;
  }
  search = new AbortController();
  try {
    const path = `labels?limit=8&q=${encodeURIComponent(query.slice(0, 200))}`;
    const { labels } = await request(path, { signal: search.signal });
    hits.replaceChildren(...labels.map((label) => side.row({
      title: label.label,
      score: label.frequency === null ? "" : count(label.frequency),
      href: side.hrefs.label(label.id),
    })));
    if (!labels.length) hits.append(h("li", {}, h("p", { class: "soft" }, "No label name contains this.")));
    hits.hidden = false;
  } catch (error) {
    if (error.name !== "AbortError") showError(error, findLabels);
  }
}

// ---- events

function moveFocus(event, list) {
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
    state.timer = setTimeout(predict, TYPING_DELAY);
  });
  byId("threshold").addEventListener("input", () => {
    const nAbove = showLabels();
    if (state.labels.length) setStatus(`${nAbove} of the best ${state.labels.length} labels`);
  });
  byId("query").addEventListener("input", () => {
    clearTimeout(state.timer);
    state.timer = setTimeout(findLabels, TYPING_DELAY);
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
    byId(id).addEventListener("keydown", (event) => moveFocus(event, byId(id)));
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && location.hash) side.close();
  });
  addEventListener("hashchange", async () => {
    byId("hits").hidden = true;
    await showPanel();
    scrollToPanel();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(byId("key").value.trim());
    byId("key-form").hidden = true;
    start();
  });
}

// ---- start

function showExamples(examples) {
  byId("examples").replaceChildren(...examples.map((text) => {
    const shown = text.length > EXAMPLE_LENGTH ? `${text.slice(0, EXAMPLE_LENGTH - 1)}…` : text;
    const use = () => {
      byId("text").value = text;
      predict();
    };
    return h("button", { type: "button", title: text, onclick: use }, shown);
  }));
}

async function start() {
  try {
    const [info, { examples }] = await Promise.all([request("info"), request("examples")]);
    state.info = info;
    clearError();
    const members = info.n_members > 1 ? ` · ${info.n_members} members` : "";
    const clusters = info.n_clusters > 1 ? ` in ${count(info.n_clusters)} clusters` : "";
    byId("about").textContent = `${info.model} · ${count(info.n_labels)} labels${clusters}${members}`;
    document.title = `${info.model} · ELIAS`;
    if (info.decisions) byId("threshold").value = info.decisions.f1;
    showLabels();
    showExamples(examples);
    if (byId("text").value.trim()) predict();
    showPanel();
  } catch (error) {
    showError(error, start);
  }
}

listen();
start();
