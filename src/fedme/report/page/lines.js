// Results against rounds and against traffic: lines with bands.

const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const lineDash = (index) => DASHES[index % DASHES.length];

function chosenLines() {
  const lines = [];
  for (const line of story.curves.lines) {
    const values = line.values[state.split]?.[state.metric];
    if (!values) continue;
    const siblings = lines.filter((other) => other.family === line.family).length;
    const label = several ? `${story.families[line.family].label}: ${line.model}` : line.model;
    lines.push({ ...line, label, mean: values.mean, std: values.std, color: runColor(line.family), mark: runMark(line.family), dash: lineDash(siblings) });
  }
  const client = clientIndex();
  const history = run().history[state.split];
  if (client >= 0 && history && state.metric === headline)
    lines.push({ family: -1, label: `${clientName(client)} (${runName(run())})`, rounds: history.rounds, megabytes: null, mean: history.values[client], std: [], color: "var(--chosen)", mark: "circle", dash: "2 2" });
  return state.late ? lines.map(lateHalf) : lines;
}

function lateHalf(line) {
  const from = Math.max(0, line.rounds.findIndex((t) => t >= line.rounds.at(-1) / 2));
  const cut = (values) => values && values.slice(from);
  return { ...line, rounds: cut(line.rounds), megabytes: cut(line.megabytes), mean: cut(line.mean), std: cut(line.std) };
}

function drawLines(figure, lines, { along, title, write, log = false }) {
  const flat = (line) => along(line).every((x) => x === 0);
  const shown = lines.filter((line) => along(line));
  const chart = frame(figure, {
    height: Math.min(340, Math.max(220, figure.clientWidth * 0.42)),
    label: `${story.curves.metrics[state.metric].title} against ${title}`,
    legend: shown.map((line) => ({ label: line.label, color: line.color, dash: line.dash, shape: line.mark, open: line.mean.length === 1, line: line.mean.length > 1 })),
  });
  const xs = shown.flatMap((line) => (flat(line) ? [] : along(line))).filter((x) => !log || x > 0);
  const ys = shown.flatMap((line) => line.mean.flatMap((y, i) => (y === null ? [] : [y - (line.std[i] ?? 0), y + (line.std[i] ?? 0)])));
  let [low, high] = [smallest(ys), largest(ys)];
  const pad = (high - low || 0.02) * 0.06;
  [low, high] = [low - pad, high + pad];
  if (isPercent(state.metric)) [low, high] = [Math.max(0, low), Math.min(1, high)];
  const first = xs.length ? smallest(xs) : 0;
  const last = xs.length ? largest(xs) : 1;
  const transform = log ? Math.log10 : (x) => x;
  const scale = linear([transform(first), first === last ? transform(first) + 1 : transform(last)], [0, chart.width]);
  const x = (value) => scale(transform(value));
  const y = linear([low, high], [chart.height, 0]);
  axisLeft(chart, y, ticks(low, high, 5), (value) => bare(value, state.metric), `${story.curves.splits[state.split]} ${story.curves.metrics[state.metric].title}${isPercent(state.metric) ? ", %" : ""}`);
  const marks = log ? ticks(Math.ceil(transform(first)), Math.floor(transform(last)), 6, true).map((power) => 10 ** power) : ticks(first, last, Math.max(3, chart.width / 90), title === "round");
  axisBelow(chart, x, marks, write, title);
  for (const line of shown) {
    const points = along(line).map((at, i) => [at, line.mean[i], line.std[i]]).filter(([at, mean]) => mean !== null && (flat(line) || !log || at > 0));
    if (flat(line)) {
      const level = y(points.at(-1)[1]);
      chart.plot.append(node("line", { class: "line", x1: 0, x2: chart.width, y1: level, y2: level, stroke: line.color, "stroke-dasharray": "1 4", "stroke-linecap": "round" }));
      continue;
    }
    const banded = points.filter(([, , std]) => std !== null && std !== undefined);
    if (banded.length > 1) {
      const edge = (sign) => banded.map(([at, mean, std]) => `${x(at)},${y(Math.min(high, Math.max(low, mean + sign * std)))}`);
      chart.plot.append(node("polygon", { class: "band", points: [...edge(1), ...edge(-1).reverse()].join(" "), fill: line.color }));
    }
    chart.plot.append(node("polyline", { class: "line", points: points.map(([at, mean]) => `${x(at)},${y(mean)}`).join(" "), stroke: line.color, "stroke-dasharray": line.dash }));
    const nth = Math.max(1, Math.ceil(points.length / 12));
    for (const [at, mean, std] of points.filter((_, i) => (points.length - 1 - i) % nth === 0)) {
      if (std) chart.plot.append(node("line", { x1: x(at), x2: x(at), y1: y(mean - std), y2: y(mean + std), stroke: line.color, "stroke-width": points.length === 1 ? 2 : 0 }));
      chart.plot.append(mark(line.mark, x(at), y(mean), points.length === 1 ? 4.8 : 4, { color: line.color, open: points.length === 1, class: points.length === 1 ? null : "halo" }));
    }
  }
  const places = [...new Set(xs)].sort((a, b) => a - b);
  hover(chart, (px) => {
    if (!places.length) return null;
    const at = places.reduce((best, place) => (Math.abs(x(place) - px) < Math.abs(x(best) - px) ? place : best));
    const rows = [];
    const outline = [node("line", { x1: x(at), x2: x(at), y1: 0, y2: chart.height, "stroke-dasharray": "2 3" })];
    for (const line of shown) {
      const i = flat(line) ? line.mean.length - 1 : along(line).indexOf(at);
      if (i < 0 || line.mean[i] === null) continue;
      const std = line.std[i];
      rows.push(`${line.label}: ${written(line.mean[i], state.metric, 2)}${std ? ` ± ${written(std, state.metric, 2)}` : ""}`);
      outline.push(node("circle", { cx: x(at), cy: y(line.mean[i]), r: 5 }));
    }
    return { tip: `${title === "round" ? `round ${at}` : `${write(at)} ${title}`}\n${rows.join("\n")}`, outline };
  }, { x: Math.max(1, chart.width / Math.max(1, places.length - 1)), y: 12 });
}

const seeded = () => story.runs.length > story.families.length;
const curveControls = () => [
  picker("split", story.curves.splits, "Samples"),
  picker("metric", Object.fromEntries(Object.entries(titles()).filter(([key]) => story.curves.lines.some((line) => line.values[state.split]?.[key]))), "Metric"),
  checker("late", "later half only"),
];

// A row per point; values and deviations as they are drawn.
function lineCsv() {
  const rows = chosenLines().flatMap((line) => line.rounds.map((t, i) => [line.label, t, line.megabytes?.[i], line.mean[i], line.std[i]]));
  return [["line", "round", "megabytes sent", `${state.split} ${state.metric}`, "standard deviation over seeds"], ...rows];
}

views.push({
  id: "rounds",
  title: "Results over rounds",
  about: () => `Mean over clients after each round${seeded() ? "; lines are means over seeds, bands are standard deviations (ddof = 1)" : "; one seed, so there is no band"}. Select a client to add its line.`,
  controls: curveControls,
  draw: (figure) => drawLines(figure, chosenLines(), { along: (line) => line.rounds, title: "round", write: (value) => `${value}` }),
  csv: lineCsv,
});

views.push({
  id: "bytes",
  title: "Results over bytes sent",
  about: () => "Results against the size of all messages, in both directions. A dotted line marks a run that sends no messages.",
  controls: () => [...curveControls(), checker("log", "logarithmic")],
  missing: () => (story.curves.lines.every((line) => line.megabytes.every((sent) => sent === 0)) ? "these runs send no messages." : null),
  draw: (figure) => {
    const { factor, name } = sizeUnit(largest(story.curves.lines.flatMap((line) => line.megabytes)));
    const scaled = chosenLines().map((line) => ({ ...line, sizes: line.megabytes?.map((size) => size / factor) ?? null }));
    drawLines(figure, scaled, { along: (line) => line.sizes, title: `${name} sent`, write: (value) => `${+value.toPrecision(3)}`, log: state.log });
  },
  csv: lineCsv,
});
