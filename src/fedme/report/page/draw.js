"use strict";
// Building blocks of all charts: elements, scales, axes, legends, and frames as wide as their figure.

const story = JSON.parse(document.getElementById("data").textContent);
const several = story.families.length > 1;
const views = []; // {id, title, about, controls?, missing?, draw} in page order
const headline = Object.keys(story.curves.metrics)[0]; // the headline metric
const state = { run: 0, client: null, split: Object.keys(story.curves.splits)[0], metric: headline, stage: "round", log: false, late: false, round: null };

const color = (index) => `var(--c${index % 8})`;
const dash = (index) => ["", "7 4", "2 3", "9 3 2 3"][Math.floor(index / 8) % 4];
const isPercent = (metric) => story.curves.metrics[metric].percent;
const higher = () => story.curves.metrics[headline].higher; // whether higher is better
const plain = (value) => `${+value.toPrecision(5)}`;
const bare = (value, metric = headline) => (isPercent(metric) ? `${+(100 * value).toFixed(2)}` : plain(value));
const written = (value, metric = headline, digits = 1) => (value === null || value === undefined ? "–" : isPercent(metric) ? `${(100 * value).toFixed(digits)} %` : plain(value));
const run = () => story.runs[state.run];
const runName = ({ family, seed }) => story.families[family].label + (story.runs.filter((other) => other.family === family).length > 1 ? `, seed ${seed}` : "");
const clientName = (index) => `client ${run().clients[index]}`;
const clientIndex = () => (state.client === null ? -1 : run().clients.indexOf(state.client));

// Charts with a row or a mark per client show at most this many clients; sorted charts show all.
const MAX_CLIENTS = 200;
const shownClients = () => run().clients.map((_, index) => index).slice(0, MAX_CLIENTS);
const truncationNote = () => (run().clients.length > MAX_CLIENTS ? ` The first ${MAX_CLIENTS} of ${run().clients.length} clients.` : "");

function build(target, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") target.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) target.setAttribute(name, value);
  }
  target.append(...children);
  return target;
}
const node = (tag, attributes, ...children) => build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const element = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);

const textContext = document.createElement("canvas").getContext("2d");
function textWidth(text, size = 12) {
  textContext.font = `${size}px system-ui, sans-serif`;
  return textContext.measureText(text).width;
}
const shorten = (text, length = 16) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
const labelWidth = (names) => Math.min(110, Math.max(...names.map((name) => textWidth(name.slice(0, 16), 10))));

function linear([a, b], [c, d]) {
  const factor = b === a ? 0 : (d - c) / (b - a);
  return (value) => c + (value - a) * factor;
}

function ticks(low, high, count, integers = false) {
  const rough = (high - low || 1) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((digit) => digit * power).find((size) => size >= rough);
  if (integers) step = Math.max(1, Math.round(step));
  const values = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) values.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return values;
}

// A frame as wide as the figure. `legend` is a list of {label, color, dash?, shape?}; it wraps.
function frame(figure, { height, left = 46, right = 14, top = 28, bottom = 40, label, legend = [] }) {
  const width = Math.max(280, Math.floor(figure.clientWidth || 640));
  const marks = node("g");
  let x = 0;
  let y = 0;
  for (const item of legend) {
    const wide = 20 + textWidth(item.label) + 14;
    if (x > 0 && x + wide > width) [x, y] = [0, y + 20];
    const middle = y + 8;
    if (item.shape === "line") marks.append(node("line", { x1: x, x2: x + 14, y1: middle, y2: middle, stroke: item.color, "stroke-width": 2.5, "stroke-dasharray": item.dash }));
    else if (item.shape === "ring") marks.append(node("circle", { cx: x + 7, cy: middle, r: 4.5, fill: "var(--card)", stroke: item.color, "stroke-width": 2 }));
    else if (item.shape === "dot") marks.append(node("circle", { cx: x + 7, cy: middle, r: 4.5, fill: item.color }));
    else marks.append(node("rect", { x: x + 1, y: middle - 6, width: 12, height: 12, rx: 2, fill: item.color }));
    marks.append(node("text", { x: x + 19, y: middle + 4 }, item.label));
    x += wide;
  }
  const above = legend.length ? y + 26 : 0;
  const svg = node("svg", { width, height: above + top + height + bottom, viewBox: `0 0 ${width} ${above + top + height + bottom}`, role: "img", "aria-label": label });
  const plot = node("g", { transform: `translate(${left},${above + top})` });
  svg.append(marks, plot);
  figure.append(svg);
  return { svg, plot, width: width - left - right, height, left };
}

function axisBelow(chart, scale, values, write, title) {
  chart.plot.append(node("line", { class: "axis", x1: 0, x2: chart.width, y1: chart.height, y2: chart.height }));
  for (const value of values) {
    const x = scale(value);
    chart.plot.append(node("line", { class: "axis", x1: x, x2: x, y1: chart.height, y2: chart.height + 4 }));
    chart.plot.append(node("text", { class: "soft", x, y: chart.height + 17, "text-anchor": "middle" }, write(value)));
  }
  chart.plot.append(node("text", { class: "soft", x: chart.width, y: chart.height + 34, "text-anchor": "end" }, title));
}

function axisLeft(chart, scale, values, write, title) {
  for (const value of values) {
    const y = scale(value);
    chart.plot.append(node("line", { class: "rule", x1: 0, x2: chart.width, y1: y, y2: y }));
    chart.plot.append(node("text", { class: "soft", x: -7, y: y + 4, "text-anchor": "end" }, write(value)));
  }
  chart.plot.append(node("text", { class: "soft", x: -chart.left, y: -14 }, title));
}

// Client names below the x axis; omitted if there is no space.
function namesBelow(chart, names, place, step) {
  if (step < 10) return;
  const longest = Math.max(...names.map((name) => textWidth(name, 10)));
  names.forEach((name, index) => {
    const x = place(index);
    const style = state.client === name ? "warn small" : "soft small";
    const turned = longest > step - 2;
    chart.plot.append(node("text", { class: style, x, y: chart.height + 14, "text-anchor": turned ? "end" : "middle", transform: turned ? `rotate(-50 ${x} ${chart.height + 10})` : null }, shorten(name, 14)));
  });
}

function heightOfNames(names, step) {
  if (step < 10) return 26;
  const longest = Math.max(...names.map((name) => textWidth(name.slice(0, 14), 10)));
  return longest > step - 2 ? 24 + 0.77 * longest : 34;
}
