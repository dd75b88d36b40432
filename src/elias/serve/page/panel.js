// The side panel: the explanation of a label, the clusters of a label, the labels of a cluster.

import { ApiError, request } from "./api.js";
import { byId, count, h, meter, number, percent } from "./dom.js";
import { graph } from "./graph.js";

const PATHS = 5;
const PAGE_SIZE = 30;
const WORDS_DELAY = 400; // ms before the effects of words are requested, because they take long to compute

export const hrefs = {
  why: (id) => `#why/${id}`,
  label: (id, member = 0) => `#label/${id}/${member}`,
  cluster: (id, member = 0) => `#cluster/${id}/${member}`,
};

let redraw = () => {};
new ResizeObserver(() => redraw()).observe(byId("panel"));

const panel = (...content) => {
  redraw = () => {};
  byId("panel").replaceChildren(...content.filter((part) => part !== null));
};

export function close() {
  const chosen = document.querySelector('#labels [aria-current="true"]');
  location.hash = "";
  (chosen ?? byId("text")).focus();
}

const heading = (title) =>
  h("div", { class: "head" }, h("h2", {}, title),
    h("button", { type: "button", onclick: close }, "Close"));

const open = (href) => () => { location.hash = href; };

export function row({ title, score, share, about, href, ...more }) {
  return h("li", {},
    h("button", { type: "button", class: "bar-row", onclick: open(href), ...more },
      h("span", {}, title),
      h("span", { class: "score" }, score),
      share === undefined ? null : meter(share),
      about ? h("span", { class: "about" }, about) : null));
}

// A model with few labels has no index: one cluster holds every label. Assume an index until /info is loaded.
const hasIndex = (info) => info?.n_clusters !== 1;

export const clear = (info) =>
  panel(h("p", { class: "soft" },
    `Select a label to see why it was predicted, or find one ${hasIndex(info) ? "to browse the index" : "by its name"}.`));

export function fail(error) {
  panel(heading(error.status === 404 ? "Not found" : "No response"),
    h("p", {}, error.status === 404 ? `${error.message}.` : error.message));
}

// ---- explanation

const FACTORS = [
  ["probability", "probability", "how often labels with this score are relevant"],
  ["score", "score", "the labels are ranked by this score"],
  ["classifier_score", "classifier", "score of the label's classifier"],
  ["path_score", "path", "best path to the label: cluster × edge"],
  ["p", "p", "classifier × path, the score of the search"],
  ["ranker_score", "ranker", "score of the sparse ranker"],
  ["name_likeness", "name", "similarity of the text and the label's name"],
  ["name_coverage", "coverage", "share of the label's name that occurs in the text"],
  ["calibrated_score", "calibrated", "estimated from the factors above"],
];

const factors = (label) =>
  h("dl", { class: "factors" },
    FACTORS.filter(([key]) => label[key] !== null && label[key] !== undefined).map(([key, name, meaning]) =>
      [h("dt", {}, (key === "probability" ? percent : number)(label[key])), h("dd", {}, name), h("dd", {}, meaning)]));

// Mark words that raise the score of the label in one colour, and words that lower it in another.
// Positions count Unicode characters, not UTF-16 units.
function highlighted(text, label) {
  const characters = [...text];
  const strongest = Math.max(...label.words.map((word) => Math.abs(word.effect)));
  const parts = [];
  let at = 0;
  for (const word of label.words) {
    parts.push(characters.slice(at, word.start).join(""));
    at = word.end;
    const share = strongest > 0 ? word.effect / strongest : 0;
    const piece = characters.slice(word.start, word.end).join("");
    if (Math.abs(share) < 0.02) {
      parts.push(piece);
      continue;
    }
    const without = word.probability === null ? "" : `; without it, the probability is ${percent(word.probability)}`;
    const title = `this word ${share > 0 ? "raises" : "lowers"} the score${without}`;
    const mark = h("mark", { class: share > 0 ? "for" : "against", title }, piece);
    mark.style.setProperty("--share", `${Math.round(10 + 30 * Math.abs(share))}%`);
    parts.push(mark);
  }
  return h("p", { class: "words" }, parts, characters.slice(at).join(""));
}

const terms = (label) =>
  h("p", { class: "soft" }, "Weights in the ranker: ",
    label.terms.slice(0, 6).map((one) => `${one.term} ${one.weight > 0 ? "+" : "−"}${number(Math.abs(one.weight))}`)
      .join(", "));

// Show the label's id in its vocabulary. If the id is a URL, make it a link.
const uri = (label) => {
  if (!label.uri) return null;
  const shown = /^https?:/.test(label.uri) ? h("a", { href: label.uri, rel: "noreferrer" }, label.uri) : label.uri;
  return h("p", { class: "soft" }, shown);
};

// Show the other names of the label and its description.
const about = (label) => {
  const names = label.synonyms.length ? h("p", { class: "soft" }, `Also: ${label.synonyms.join(", ")}`) : null;
  return [names, label.description ? h("p", {}, label.description) : null];
};

export async function why(text, id, info, signal) {
  const body = { inputs: [text], label: id, paths: PATHS };
  const [explanation] = await request("explain", { body, signal });
  const label = explanation.labels[0];
  const clusters = new Map(explanation.clusters.map((cluster) => [cluster.id, cluster.labels]));
  const graphBox = h("div", { class: "graph" });
  const wordBox = h("div");
  const hidden = label.n_paths - label.paths.length;
  const hasPaths = label.n_paths > 0;
  let how = "The text is compared with clusters of labels; edges lead from the best clusters to labels. "
    + "Only the best path counts; it is drawn in colour. Scores range from 0 to 1.";
  if (label.added) {
    how = "This label has no training texts, or was added without training. Its score depends on how similar "
      + "its name and description are to the text, and how much of its name occurs in the text.";
  } else if (!hasIndex(info)) {
    how = "This model has no index: each label's classifier scores the text. Scores range from 0 to 1.";
  } else if (!hasPaths) {
    how = "No path through clusters leads to this label: the classifier of the label scores the text. Scores range from 0 to 1.";
  }
  panel(
    heading(label.label),
    uri(label),
    ...about(label),
    h("p", { class: "soft" }, how),
    hasPaths ? graphBox : null,
    wordBox,
    h("h3", {}, "Factors of the score"),
    factors(hasPaths ? label : { ...label, path_score: null }),
    info?.n_members > 1
      ? h("p", { class: "soft" },
        `Explained by member ${explanation.member + 1} of ${info.n_members}; the ranking uses the mean of all members.`)
      : null,
    hasPaths ? h("h3", {}, "Clusters on the paths") : null,
    h("ol", {}, label.paths.map((path) => row({
      title: (clusters.get(path.cluster) ?? []).slice(0, 3).join(" · "),
      score: number(path.score),
      share: path.score,
      about: `cluster ${path.cluster}: ${number(path.cluster_score)} × edge ${number(path.edge_score)}`,
      href: hrefs.cluster(path.cluster, explanation.member),
    }))),
    hidden > 0 ? h("p", { class: "soft more" }, `and ${hidden} more`) : null,
    hasPaths
      ? h("p", { class: "more" }, h("a", { href: hrefs.label(id, explanation.member) }, "All clusters of this label"))
      : null,
  );
  if (hasPaths) redraw = () => {
    const width = Math.max(280, graphBox.clientWidth - 20);
    graphBox.replaceChildren(graph(width, label, clusters, (c) => hrefs.cluster(c, explanation.member)));
  };
  redraw();
  setTimeout(() => showWords(wordBox, text, { ...body, words: true }, signal), WORDS_DELAY);
}

async function showWords(box, text, body, signal) {
  if (signal.aborted) return;
  try {
    const [{ labels: [label] }] = await request("explain", { body, signal });
    if (!label.words.length) return;
    box.append(
      h("h3", {}, "Words"),
      highlighted(text, label),
      h("p", { class: "soft" }, "Each word was left out in turn. Words that raise the label's score are marked ",
        h("mark", { class: "for" }, "for"), ", words that lower it ", h("mark", { class: "against" }, "against"), "."),
    );
    if (label.terms.length) box.append(terms(label));
  } catch (error) {
    if (!(error instanceof ApiError)) {
      if (error.name === "AbortError") return;
      throw error;
    }
    box.append(h("p", { class: "soft" }, `The effects of the words could not be computed: ${error.message}`));
  }
}

// ---- the index

function moreButton(list, total, fetchMore) {
  const more = h("p", { class: "more" });
  const button = h("button", { type: "button", class: "plain" }, "Show more");
  button.addEventListener("click", async () => {
    button.disabled = true;
    const shown = list.children.length;
    list.append(...await fetchMore(shown).catch(() => []));
    button.disabled = false;
    if (list.children.length >= total || list.children.length === shown) more.remove();
    list.children[shown]?.querySelector("button")?.focus();
  });
  more.append(button);
  return list.children.length < total ? more : null;
}

const clusterRow = (member) => (edge) => row({
  title: edge.labels.join(" · "),
  score: number(edge.edge_score),
  share: edge.edge_score,
  about: `cluster ${edge.id}`,
  href: hrefs.cluster(edge.id, member),
});

const labelRow = (member) => (edge) => row({
  title: edge.label,
  score: number(edge.edge_score),
  share: edge.edge_score,
  href: hrefs.label(edge.id, member),
});

export async function label(id, member, info, signal) {
  const query = (start) => `labels/${id}?member=${member}&limit=${PAGE_SIZE}&start=${start}`;
  const page = await request(query(0), { signal });
  const list = h("ol", {}, page.clusters.map(clusterRow(member)));
  const points = page.frequency === null ? "" : ` · ${count(page.frequency)} training texts`;
  const clusters = hasIndex(info) ? ` · in ${count(page.n_clusters)} clusters` : "";
  panel(
    heading(page.label),
    h("p", { class: "soft" }, `Label ${id}${points}${clusters}`),
    uri(page),
    ...about(page),
    ...(hasIndex(info) ? [
      h("h3", {}, "Clusters by edge score"),
      list,
      moreButton(list, page.n_clusters,
        async (start) => (await request(query(start))).clusters.map(clusterRow(member))),
    ] : []),
  );
}

export async function cluster(id, member, info, signal) {
  const query = (start) => `clusters/${id}?member=${member}&limit=${PAGE_SIZE}&start=${start}`;
  const page = await request(query(0), { signal });
  const list = h("ol", {}, page.labels.map(labelRow(member)));
  panel(
    heading(`Cluster ${id}`),
    h("p", { class: "soft" }, `${count(page.n_labels)} labels`),
    h("h3", {}, "Labels by edge score"),
    list,
    moreButton(list, page.n_labels,
      async (start) => (await request(query(start))).labels.map(labelRow(member))),
  );
}
