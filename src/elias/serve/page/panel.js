// The side: why a label was found, a label's clusters, a cluster's labels.

import { ask } from "./api.js";
import { byId, count, h, meter, number } from "./dom.js";
import { graph } from "./graph.js";

const PATHS = 5;
const AT_A_TIME = 30;

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

export const clear = () =>
  panel(h("p", { class: "soft" }, "Choose a label to see why it was found, or find one to walk about in the index."));

export function fail(error) {
  panel(heading(error.status === 404 ? "Not there" : "No answer"),
    h("p", {}, error.status === 404 ? `${error.message}.` : error.message));
}

// ---- why

const FACTORS = [
  ["probability", "probability", "how often labels with such a score are right"],
  ["score", "score", "what labels are ranked by"],
  ["classifier_score", "classifier", "what the label's own classifier says of the text"],
  ["path_score", "path", "the best way to the label: cluster × edge"],
  ["p", "p", "classifier × path, the score of the search"],
  ["ranker_score", "ranker", "what the sparse ranker says of the words"],
  ["name_likeness", "name", "how alike the text and the label's name are"],
  ["calibrated_score", "calibrated", "what decision trees make of the above"],
];

const factors = (label) =>
  h("dl", { class: "factors" },
    FACTORS.filter(([key]) => label[key] !== null && label[key] !== undefined).map(([key, name, told]) =>
      [h("dt", {}, number(label[key])), h("dd", {}, name), h("dd", {}, told)]));

export async function why(text, id, nMembers, signal) {
  const body = { inputs: [text], label: id, paths: PATHS };
  const [found] = await ask("explain", { body, signal });
  const label = found.labels[0];
  const clusters = new Map(found.clusters.map((cluster) => [cluster.id, cluster.labels]));
  const drawn = h("div", { class: "graph" });
  const hidden = label.n_paths - label.paths.length;
  const about = "A text is compared with clusters of labels; edges lead from the best of them to labels. "
    + "The best path counts, drawn in colour. Numbers are scores from 0 to 1.";
  panel(
    heading(label.label),
    h("p", { class: "soft" }, about),
    drawn,
    h("h3", {}, "What its score is made of"),
    factors(label),
    nMembers > 1
      ? h("p", { class: "soft" },
        `Member ${found.member + 1} of ${nMembers} is shown; the ranking is the mean of all.`)
      : null,
    h("h3", {}, "Clusters on the way"),
    h("ol", {}, label.paths.map((path) => row({
      title: (clusters.get(path.cluster) ?? []).slice(0, 3).join(" · "),
      score: number(path.score),
      share: path.score,
      about: `cluster ${path.cluster}: ${number(path.cluster_score)} × edge ${number(path.edge_score)}`,
      href: hrefs.cluster(path.cluster, found.member),
    }))),
    hidden > 0 ? h("p", { class: "soft more" }, `and ${hidden} more`) : null,
    h("p", { class: "more" }, h("a", { href: hrefs.label(id, found.member) }, "All clusters of this label")),
  );
  redraw = () => {
    const width = Math.max(280, drawn.clientWidth - 20);
    drawn.replaceChildren(graph(width, label, clusters, (c) => hrefs.cluster(c, found.member)));
  };
  redraw();
}

// ---- the index

function growing(list, total, fetchMore) {
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

export async function label(id, member, signal) {
  const query = (start) => `labels/${id}?member=${member}&limit=${AT_A_TIME}&start=${start}`;
  const found = await ask(query(0), { signal });
  const list = h("ol", {}, found.clusters.map(clusterRow(member)));
  const points = found.frequency === null ? "" : ` · ${count(found.frequency)} training texts`;
  panel(
    heading(found.label),
    h("p", { class: "soft" }, `Label ${id}${points} · hangs under ${count(found.n_clusters)} clusters`),
    h("h3", {}, "Its clusters, by the strength of the edge"),
    list,
    growing(list, found.n_clusters,
      async (start) => (await ask(query(start))).clusters.map(clusterRow(member))),
  );
}

export async function cluster(id, member, signal) {
  const query = (start) => `clusters/${id}?member=${member}&limit=${AT_A_TIME}&start=${start}`;
  const found = await ask(query(0), { signal });
  const list = h("ol", {}, found.labels.map(labelRow(member)));
  panel(
    heading(`Cluster ${id}`),
    h("p", { class: "soft" }, `${count(found.n_labels)} labels hang under it`),
    h("h3", {}, "Its labels, by the strength of the edge"),
    list,
    growing(list, found.n_labels,
      async (start) => (await ask(query(start))).labels.map(labelRow(member))),
  );
}
