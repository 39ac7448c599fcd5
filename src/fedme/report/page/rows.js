// One row per client along a common axis. More than FEW clients become a histogram above the rows of the ten worst and the ten best.

const TEN = 10;

function extremes(order) {
  if (order.length <= FEW) return [{ heading: "", order }];
  const parts = [{ heading: "the ten worst", order: order.slice(0, TEN) }, { heading: "the ten best", order: order.slice(-TEN) }];
  const chosen = clientIndex();
  if (order.includes(chosen) && !parts.some((part) => part.order.includes(chosen))) parts.unshift({ heading: "selected", order: [chosen] });
  return parts;
}

// `series` are {label, color, values}, stacked in the histogram, or outlined if `outlined`. `row(group, index, x, y, half)` draws
// a row; `side` is {title, text(index)}, a column of text on the right.
function drawRows(figure, { order, series, outlined = false, low, high, write, axis, legend, label, side, row, tip }) {
  const parts = extremes(order);
  const crowd = order.length > FEW;
  const names = parts.flatMap((part) => part.order.map((index) => run().clients[index]));
  const tall = names.length > 24 ? 15 : 19;
  const [above, gap] = crowd ? [110, 18] : [0, 0];
  const places = []; // {index, y}
  const headings = [];
  let y = above + gap;
  for (const part of parts) {
    if (part.heading) {
      headings.push([part.heading, y + 13]);
      y += 19;
    }
    for (const index of part.order) {
      places.push({ index, y: y + tall / 2 });
      y += tall;
    }
    y += part.heading ? 5 : 0;
  }
  const left = Math.max(16 + labelWidth(names, 18), crowd ? 92 : 40);
  const right = 16 + Math.max(textWidth(side.title, SMALL), labelWidth(names.map((_, i) => side.text(places[i].index))));
  const chart = frame(figure, { height: y + 4, left, right, top: 20, bottom: 40, label, legend });
  const x = linear([low, high], [4, chart.width - 4]);
  const marks = ticks(low, high, Math.max(3, chart.width / 80));
  for (const value of marks) chart.plot.append(node("line", { class: "rule", x1: x(value), x2: x(value), y1: 0, y2: chart.height }));
  axisBelow(chart, x, marks, write, axis);
  if (low < 0 && high > 0) chart.plot.append(node("line", { class: "axis", x1: x(0), x2: x(0), y1: 0, y2: chart.height }));
  const bins = crowd ? histogram(chart, { series, outlined, low, high, x, height: above }) : null;
  for (const [text, at] of headings) chart.plot.append(node("text", { class: "soft small", x: -left, y: at, "font-style": "italic" }, text));
  chart.plot.append(node("text", { class: "soft small", x: chart.width + right, y: above + gap - (crowd ? -13 : 8), "text-anchor": "end" }, side.title));
  for (const { index, y } of places) {
    const name = run().clients[index];
    const style = state.client === name ? "chosen small" : "soft small";
    chart.plot.append(node("text", { class: style, x: -8, y: y + 4, "text-anchor": "end" }, shorten(name, 18)));
    chart.plot.append(node("text", { class: "soft small", x: chart.width + right, y: y + 4, "text-anchor": "end" }, side.text(index)));
    const group = node("g", { class: `client-row${dim(index)}` });
    row(group, index, x, y, tall / 2);
    chart.plot.append(group);
  }
  hover(chart, (px, py) => {
    if (bins && py < above) return bins.locate(px);
    const near = places.reduce((best, place) => (Math.abs(place.y - py) < Math.abs(best.y - py) ? place : best), places[0]);
    if (!near || Math.abs(near.y - py) > 1.5 * tall) return null;
    return { tip: tip(near.index, order.indexOf(near.index)), client: run().clients[near.index], outline: [node("rect", { x: 0, width: chart.width, y: near.y - tall / 2, height: tall })] };
  }, { x: bins ? bins.wide : 12, y: tall });
}

function histogram(chart, { series, outlined, low, high, x, height }) {
  let count = Math.max(8, Math.min(40, Math.floor(chart.width / 16)));
  if (low < 0 && high > 0) { // 0 is the middle of a bar: clients that neither gained nor lost are on no side
    const step = (high - low) / count;
    low = -(Math.ceil(-low / step - 0.5) + 0.5) * step;
    high = low + (count + 1) * step;
    count += 1;
  }
  const wide = (x(high) - x(low)) / count;
  const binOf = (value) => Math.min(count - 1, Math.max(0, Math.floor(((value - low) / (high - low || 1)) * count)));
  const counted = series.map(({ values }) => {
    const bins = new Array(count).fill(0);
    for (const value of values) if (known(value)) bins[binOf(value)] += 1;
    return bins;
  });
  const totals = Array.from({ length: count }, (_, i) => (outlined ? largest(counted.map((bins) => bins[i])) : counted.reduce((sum, bins) => sum + bins[i], 0)));
  const most = largest(totals, 1);
  const y = linear([0, most], [height, 12]);
  for (const value of ticks(0, most, 3, true)) {
    chart.plot.append(node("text", { class: "soft small", x: -7, y: y(value) + 4, "text-anchor": "end" }, value.toLocaleString("en")));
    chart.plot.append(node("line", { class: "rule", x1: 0, x2: chart.width, y1: y(value), y2: y(value) }));
  }
  chart.plot.append(node("text", { class: "soft small", x: -chart.left, y: 8 }, "clients"));
  const below = new Array(count).fill(0);
  series.forEach(({ color, dash }, k) => {
    if (outlined && k > 0) {
      const path = counted[k].map((bin, i) => `${i ? "L" : "M"}${x(low) + i * wide} ${y(bin)}h${wide}`).join("");
      chart.plot.append(node("path", { d: path, fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash }));
      return;
    }
    counted[k].forEach((bin, i) => {
      if (bin) chart.plot.append(node("rect", { class: "bin", x: x(low) + i * wide + 0.5, width: Math.max(1, wide - 1), y: y(below[i] + bin), height: y(below[i]) - y(below[i] + bin), fill: color, "fill-opacity": outlined ? 0.55 : 1 }));
      below[i] += bin;
    });
  });
  const ends = (i) => [low + ((high - low) * i) / count, low + ((high - low) * (i + 1)) / count];
  return {
    wide,
    locate: (px) => {
      const i = Math.min(count - 1, Math.max(0, Math.floor((px - x(low)) / wide)));
      const rows = series.map(({ label }, k) => `${label}: ${many(counted[k][i], "client")}`);
      return { tip: [`${bare(ends(i)[0])} to ${bare(ends(i)[1])}`, ...rows].join("\n"), outline: [node("rect", { x: x(low) + i * wide, width: wide, y: 0, height })] };
    },
  };
}
