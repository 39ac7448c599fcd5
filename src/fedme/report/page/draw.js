// Building blocks of all charts: elements, scales, axes, legends, marks, and frames as wide as their figure.

// One palette per meaning (page.css). A mark or a dash goes with every colour of a line or a dot.
const MARKS = ["circle", "square", "diamond", "triangle", "plus", "cross", "down"];
const runColor = (index) => `var(--run${index % 5})`;
const runMark = (index) => MARKS[index % MARKS.length];
const archColor = (index) => `var(--arch${index % 9})`;
const clusterColor = (index) => `var(--cluster${index % 8})`;
const SIDES = { gained: ["var(--gained)", "triangle"], lost: ["var(--lost)", "down"], "not clear": ["var(--unclear)", "circle"] };

const FEW = 40; // up to so many clients have a row or a mark each with its name; of more, the extremes and groups are shown

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

// A text in which `commands` are marked by backticks. A line does not end between a number and its unit.
const prose = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part.replace(/(\d) (?=%|[kMG]?B\b|s\b)/g, "$1\u00a0")));

const textContext = document.createElement("canvas").getContext("2d");
function textWidth(text, size = 12) {
  textContext.font = `${size}px system-ui, sans-serif`;
  return textContext.measureText(text).width;
}
const SMALL = 11; // size of small text
const labelWidth = (names, length = 16) => names.reduce((most, name) => Math.max(most, textWidth(shorten(name, length), SMALL)), 10);
const largest = (values, least = -Infinity) => values.reduce((most, value) => (known(value) && value > most ? value : most), least);
const smallest = (values, most = Infinity) => values.reduce((least, value) => (known(value) && value < least ? value : least), most);

function linear([a, b], [c, d]) {
  const factor = b === a ? 0 : (d - c) / (b - a);
  return (value) => c + (value - a) * factor;
}

// Round values from `low` to `high`: about `count`, and at least three unless integers are further apart.
function ticks(low, high, count, integers = false) {
  const rough = (high - low || 1) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const steps = [10, 5, 2, 1, 0.5, 0.2].map((digit) => digit * power).filter((step) => !integers || step >= 1);
  const within = (step) => {
    const values = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) values.push(Math.abs(at) < step * 1e-9 ? 0 : at);
    return values;
  };
  const allowed = [...steps.filter((step) => step >= rough).slice(-1), ...steps.filter((step) => step < rough)].map((step) => (integers ? Math.round(step) : step));
  if (!allowed.length) allowed.push(1);
  return within(allowed.find((step) => within(step).length >= 3) ?? allowed.at(-1));
}

// A mark of about radius `r`. `open` marks have an outline only.
function mark(shape, x, y, r, { color, open = false, ...more }) {
  const paint = open ? { fill: "var(--card)", stroke: color, "stroke-width": 1.8 } : { fill: color };
  const polygon = (corners) => node("polygon", { points: corners.map(([dx, dy]) => `${x + dx * r},${y + dy * r}`).join(" "), ...paint, ...more });
  if (shape === "square") return node("rect", { x: x - 0.86 * r, y: y - 0.86 * r, width: 1.72 * r, height: 1.72 * r, ...paint, ...more });
  if (shape === "triangle") return polygon([[0, -1.15], [1.08, 0.78], [-1.08, 0.78]]);
  if (shape === "down") return polygon([[0, 1.15], [1.08, -0.78], [-1.08, -0.78]]);
  if (shape === "diamond") return polygon([[0, -1.25], [1.1, 0], [0, 1.25], [-1.1, 0]]);
  if (shape === "plus") return polygon([[-0.4, -1.1], [0.4, -1.1], [0.4, -0.4], [1.1, -0.4], [1.1, 0.4], [0.4, 0.4], [0.4, 1.1], [-0.4, 1.1], [-0.4, 0.4], [-1.1, 0.4], [-1.1, -0.4], [-0.4, -0.4]]);
  if (shape === "cross") return polygon([[-1.05, -0.5], [-0.5, -1.05], [0, -0.55], [0.5, -1.05], [1.05, -0.5], [0.55, 0], [1.05, 0.5], [0.5, 1.05], [0, 0.55], [-0.5, 1.05], [-1.05, 0.5], [-0.55, 0]]);
  return node("circle", { cx: x, cy: y, r, ...paint, ...more });
}

// Many rectangles as one path per colour: `add(key, x, y, width, height)`, then `paths((key) => attributes)`.
function cells() {
  const parts = new Map();
  const short = (value) => `${+value.toFixed(2)}`;
  return {
    add: (key, x, y, width, height) => {
      if (!parts.has(key)) parts.set(key, []);
      parts.get(key).push(`M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}z`);
    },
    paths: (attributes) => [...parts].map(([key, pieces]) => node("path", { d: pieces.join(""), ...attributes(key) })),
  };
}

// A frame as wide as the figure. `legend` is a list of {label, color, dash?, shape?, open?}; it wraps.
function frame(figure, { height, left = 46, right = 14, top = 28, bottom = 40, label, legend = [] }) {
  const width = Math.max(280, Math.floor(figure.clientWidth || 640));
  const marks = node("g");
  let x = 0;
  let y = 0;
  for (const item of legend) {
    const text = shorten(item.label, 60);
    const wide = 24 + textWidth(text) + 14;
    if (x > 0 && x + wide > width) [x, y] = [0, y + 20];
    const middle = y + 9;
    const line = { x1: x, x2: x + 20, y1: middle, y2: middle, stroke: item.color, "stroke-width": 2.5, "stroke-dasharray": item.dash };
    if (item.shape === "line" || item.line) marks.append(node("line", line));
    if (item.shape === "swatch" || !item.shape) marks.append(node("rect", { x: x + 3, y: middle - 6, width: 14, height: 12, rx: 2, fill: item.color, "fill-opacity": item.opacity }));
    else if (item.shape === "tick") marks.append(node("line", { x1: x + 10, x2: x + 10, y1: middle - 6, y2: middle + 6, stroke: item.color, "stroke-width": 2 }));
    else if (item.shape !== "line") marks.append(mark(item.shape, x + 10, middle, 4.6, { color: item.color, open: item.open }));
    marks.append(node("text", { x: x + 25, y: middle + 4 }, text));
    x += wide;
  }
  const above = legend.length ? y + 28 : 0;
  const svg = node("svg", { width, height: above + top + height + bottom, viewBox: `0 0 ${width} ${above + top + height + bottom}`, role: "img", tabindex: 0, "aria-label": `${label}. Arrow keys read the values; the CSV file below has all of them.` });
  const plot = node("g", { transform: `translate(${left},${above + top})` });
  svg.append(marks, plot);
  figure.append(svg);
  return { svg, plot, width: width - left - right, height, left, right };
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

// Names below the x axis, turned if they are long; of very many, every n-th.
const SPACE = 13; // between names
const everyNth = (step) => Math.max(1, Math.ceil(SPACE / step));
const turnedNames = (names, step) => everyNth(step) > 1 || labelWidth(names, 14) > step - 4;

function namesBelow(chart, names, place, step, at = chart.height) {
  const turned = turnedNames(names, step);
  const nth = everyNth(step);
  names.forEach((name, index) => {
    const chosen = state.client === name;
    if (index % nth && !chosen) return;
    if (!chosen && nth > 1 && names.some((other, i) => other === state.client && Math.abs(i - index) < nth)) return;
    const x = place(index);
    chart.plot.append(node("text", { class: chosen ? "chosen small" : "soft small", x: turned ? x + 4 : x, y: at + 14, "text-anchor": turned ? "end" : "middle", transform: turned ? `rotate(-60 ${x + 4} ${at + 10})` : null }, shorten(name, 14)));
  });
}

const heightOfNames = (names, step) => (turnedNames(names, step) ? 22 + 0.88 * labelWidth(names, 14) : 24);
const dim = (index) => (state.client !== null && run().clients[index] !== state.client ? " dim" : "");
