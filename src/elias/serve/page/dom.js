// Create elements. Text is always set as text, so nothing from the server becomes markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (name, properties, ...children) =>
  fill(document.createElement(name), properties, children);

export const s = (name, properties, ...children) =>
  fill(document.createElementNS(SVG, name), properties, children);

export const byId = (id) => document.getElementById(id);

// Show a share as a bar. A script sets its width: the page's policy forbids style attributes.
export function meter(share) {
  const inner = h("span");
  inner.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return h("span", { class: "meter", "aria-hidden": "true" }, inner);
}

// Format a score with two decimals, or in scientific notation if it is tiny.
export const number = (value) =>
  value === 0 || value >= 0.005 ? value.toFixed(2) : value.toExponential(0);

export const percent = (share) => {
  const points = 100 * share;
  return points > 0 && points < 1 ? "<1%" : `${Math.round(points)}%`;
};

export const count = (value) => value.toLocaleString("en");
