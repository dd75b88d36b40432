// Draw the paths from the text through clusters to a label.

import { number, s } from "./dom.js";

const NARROW = 460; // pixels; below this width the graph runs downwards
const LETTER = 6.9; // approximate width of a letter in pixels
const BOLD = 7.8;

const cut = (text, width, letter = LETTER) => {
  const maxLetters = Math.max(3, Math.floor(width / letter));
  return text.length <= maxLetters ? text : `${text.slice(0, maxLetters - 1)}…`;
};

// Break a name between words into at most two lines.
function wrap(text, width, letter) {
  const maxLetters = Math.floor(width / letter);
  const end = text.lastIndexOf(" ", maxLetters);
  if (text.length <= maxLetters || end < 1) return [cut(text, width, letter)];
  return [text.slice(0, end), cut(text.slice(end + 1), width, letter)];
}

const thickness = (score) => 1 + 4 * Math.sqrt(score);

function box(x, y, width, height, kind, lines) {
  const group = s("g", {});
  group.append(s("rect", { x, y, width, height, rx: 8, class: kind }));
  const first = y + height / 2 - (lines.length - 1) * 7.5 + 4;
  lines.forEach(([text, style], i) => {
    group.append(
      s("text", { x: x + width / 2, y: first + 15 * i, "text-anchor": "middle", class: style },
        cut(text, width - 12, style === "strong" ? BOLD : LETTER)),
    );
  });
  return group;
}

function edge(from, to, down, score, won) {
  const [x1, y1] = from;
  const [x2, y2] = to;
  const middle = down ? (y1 + y2) / 2 : (x1 + x2) / 2;
  const curve = down
    ? `M${x1} ${y1}C${x1} ${middle} ${x2} ${middle} ${x2} ${y2}`
    : `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
  return s("path", { d: curve, class: won ? "edge won" : "edge", "stroke-width": thickness(score) });
}

const scoreText = (x, y, score) =>
  s("text", { x, y, class: "small", "text-anchor": "middle" }, number(score));

// Each cluster has a row if the graph runs to the right, or a column if it runs down.
function rightwards(width, paths) {
  const height = paths.length * 78 + 8;
  const [left, right] = [86, Math.min(180, width * 0.29)];
  const gap = Math.max(44, (width - left - right) * 0.17);
  const middle = width - left - right - 2 * gap;
  const at = (i) => 8 + 78 * i + 35;
  return {
    height,
    text: [0, height / 2 - 20, left, 40],
    label: [width - right, height / 2 - 22, right, 44],
    cluster: (i) => [left + gap, at(i) - 35, middle, 70],
    into: (i) => [[left, height / 2], [left + gap, at(i)]],
    outOf: (i) => [[left + gap + middle, at(i)], [width - right, height / 2]],
    noteInto: (i) => [left + gap - 18, at(i) + 4],
    noteOutOf: (i) => [left + gap + middle + 18, at(i) + 4],
  };
}

function downwards(width, paths) {
  const space = 8;
  const column = (width - space * (paths.length - 1)) / paths.length;
  const at = (i) => i * (column + space) + column / 2;
  return {
    height: 292,
    text: [width / 2 - 50, 2, 100, 34],
    label: [width * 0.1, 246, width * 0.8, 42],
    cluster: (i) => [at(i) - column / 2, 96, column, 84],
    into: (i) => [[width / 2, 36], [at(i), 96]],
    outOf: (i) => [[at(i), 180], [width / 2, 246]],
    noteInto: (i) => [at(i), 88],
    noteOutOf: (i) => [at(i), 196],
  };
}

export function graph(width, label, clusters, hrefOf) {
  const down = width < NARROW;
  const paths = label.paths.slice(0, down ? 3 : 4);
  const layout = (down ? downwards : rightwards)(width, paths);
  const summary = paths.map((path) => `cluster ${path.cluster}, ${number(path.score)}`).join("; ");
  const svg = s("svg", {
    viewBox: `0 0 ${width} ${layout.height}`,
    role: "img",
    "aria-label": `Paths from the text to ${label.label}: ${summary}`,
  });
  const inOrder = paths.map((path, i) => [path, i]).reverse(); // draw the best path last, on top
  for (const [path, i] of inOrder) {
    svg.append(edge(...layout.into(i), down, path.cluster_score, path.won));
    svg.append(edge(...layout.outOf(i), down, path.edge_score, path.won));
  }
  for (const [path, i] of inOrder) {
    const names = clusters.get(path.cluster) ?? [];
    const lines = [...names.slice(0, 3).map((name) => [name, ""]), [`cluster ${path.cluster}`, "small"]];
    const link = s("a", { href: hrefOf(path.cluster), tabindex: "-1", class: path.won ? "won" : null },
      s("title", {}, `Cluster ${path.cluster}: ${names.join(", ")}`),
      box(...layout.cluster(i), "box", lines));
    svg.append(link, scoreText(...layout.noteInto(i), path.cluster_score),
      scoreText(...layout.noteOutOf(i), path.edge_score));
  }
  svg.append(box(...layout.text, "end", [["your text", ""]]));
  const lines = wrap(label.label, layout.label[2] - 12, BOLD);
  svg.append(box(...layout.label, "end", lines.map((line) => [line, "strong"])));
  return svg;
}
