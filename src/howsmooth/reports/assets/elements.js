"use strict";
// Building blocks: elements made from text alone (never from markup), numbers in words, colours, the tip.

const find = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A number in few digits; "up" and "down" keep bounds true.
function written(x, way = "near", digits = 4) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const scale = 10 ** (digits - 1 - Math.floor(Math.log10(Math.abs(x))));
  const exact = Number((x * scale).toPrecision(12));
  const whole = { near: Math.round, up: Math.ceil, down: Math.floor }[way](exact);
  const value = Number((whole / scale).toPrecision(digits)), size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) {
    const [front, power] = value.toExponential().split("e");
    return `${front === "1" ? "" : `${front}·`}10${superscript(Number(power))}`;
  }
  return (size < 10 ** digits ? value.toPrecision(digits) : String(value)).replace("-", "−");
}

// An error in two decimals, never smaller than it is.
const atMost = (x) => (x < 1e-9 ? 0 : Math.ceil(100 * x - 1e-6) / 100).toFixed(2);

// The ends of many numbers; too many for the arguments of Math.min and Math.max.
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// A round number, as on axes.
const plainly = (x) => (x >= 1e5 || x < 1e-4 ? written(x, "near", 1) : String(x));
const decimals = (x) => x.toFixed(2).replace("-", "−");

const superscript = (n) => String(n).replace(/./g, (c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]));
const percent = (share) => `${written(100 * share, "near", share >= 0.995 ? 3 : 2)} %`;
const ordinal = (n) => n + ([11, 12, 13].includes(n % 100) ? "th" : ["th", "st", "nd", "rd"][n % 10] || "th");
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
};

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// A place between the low and the high colour of the theme, and black or white, whichever reads better on it.
function shade(t, low = "--low") {
  const [from, to] = [channels(colour(low)), channels(colour("--high"))];
  const mixed = from.map((c, i) => Math.round(c + (to[i] - c) * Math.min(1, Math.max(0, t))));
  const linear = mixed.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return { background: `rgb(${mixed.join(" ")})`, color: luminance > 0.179 ? "#000" : "#fff" };
}

function tipOn(node, say) {
  const tip = find("tip");
  const show = (event) => {
    tip.textContent = say();
    tip.hidden = false;
    const box = node.getBoundingClientRect();
    const x = event.clientX === undefined || event.clientX === 0 ? box.left : event.clientX + 14;
    tip.style.left = `${Math.max(8, Math.min(x, innerWidth - tip.offsetWidth - 8))}px`;
    const below = box.bottom + 10;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 10 : below}px`;
  };
  for (const name of ["mouseenter", "mousemove", "focus"]) node.addEventListener(name, show);
  for (const name of ["mouseleave", "blur"]) node.addEventListener(name, () => { tip.hidden = true; });
  return node;
}

// One tab stop for many items: arrows move between them. `columns` is the width of a grid, 1 for a line.
function roving(items, columns, start = 0) {
  items.forEach((item, at) => {
    item.tabIndex = at === start ? 0 : -1;
    item.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
      const next = event.key === "Home" ? 0 : event.key === "End" ? items.length - 1 : at + step;
      if (!(next >= 0 && next < items.length)) return;
      event.preventDefault();
      items.forEach((other) => { other.tabIndex = -1; });
      items[next].tabIndex = 0;
      items[next].focus();
    });
  });
}
