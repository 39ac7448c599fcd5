// Clients by rounds: a row per client, in groups that have the same value at the end.

// `value(index, column)` is the number of a colour, or -1; equal neighbours are drawn as one. `order` is sorted by the last value.
function drawGrid(figure, { order, columns, value, paint, group, legend, label, tip, marked, write, title, numbered }) {
  const names = order.map((index) => run().clients[index]);
  const crowd = order.length > FEW;
  const groups = [];
  order.forEach((index, rank) => {
    const text = group(index);
    if (groups.at(-1)?.text === text) groups.at(-1).to = rank + 1;
    else groups.push({ text, from: rank, to: rank + 1 });
  });
  for (const one of groups) one.label = `${one.text} (${one.to - one.from})`;
  const left = 18 + labelWidth(crowd ? groups.map((one) => one.label) : names, crowd ? 22 : 16);
  const row = Math.max(0.5, Math.min(20, Math.max(crowd ? 0 : 12, (crowd ? 480 : 420) / order.length)));
  const chart = frame(figure, { height: row * order.length, left, top: 8, label, legend });
  const wide = chart.width / columns;
  const gap = row > 8 ? 1 : 0;
  const filled = cells();
  order.forEach((index, rank) => {
    for (let from = 0; from < columns; ) {
      let to = from + 1;
      while (to < columns && value(index, to) === value(index, from)) to += 1;
      filled.add(`${value(index, from)}${dim(index)}`, from * wide, rank * row, (to - from) * wide, row - gap);
      from = to;
    }
  });
  chart.plot.append(...filled.paths((key) => ({ class: `cell${key.startsWith("-") ? " none" : ""}${key.endsWith("dim") ? " dim" : ""}`, fill: key.startsWith("-") ? null : paint(parseInt(key, 10)) })));
  if (marked && wide > 3 && row > 6) order.forEach((index, rank) => {
    for (let column = 0; column < columns; column += 1)
      if (marked(index, column)) chart.plot.append(node("circle", { class: `adoption${dim(index)}`, cx: (column + 0.5) * wide, cy: (rank + 0.5) * row - gap / 2, r: Math.min(2.6, row * 0.3, wide * 0.3) }));
  });
  if (numbered && row >= 11 && wide >= 11) order.forEach((index, rank) => {
    for (let column = 0; column < columns; column += 1)
      if (value(index, column) >= 0) chart.plot.append(node("text", { class: `small inside${dim(index)}`, x: (column + 0.5) * wide, y: (rank + 0.5) * row + 3.5, "text-anchor": "middle" }, `${value(index, column)}`));
  });
  if (crowd) {
    let last = -Infinity;
    for (const { label, from, to } of groups) {
      const y = ((from + to) / 2) * row;
      chart.plot.append(node("line", { class: "axis", x1: -6, x2: -2, y1: from * row, y2: from * row }));
      if (y - last < SPACE) continue;
      chart.plot.append(node("text", { class: "soft small", x: -8, y: y + 4, "text-anchor": "end" }, shorten(label, 22)));
      last = y;
    }
    const rank = order.indexOf(clientIndex());
    if (rank >= 0) chart.plot.append(node("text", { class: "chosen small haloed", x: 4, y: Math.max(10, (rank + 0.5) * row + 4) }, names[rank]));
  } else names.forEach((name, rank) => chart.plot.append(node("text", { class: state.client === name ? "chosen small" : "soft small", x: -6, y: (rank + 0.5) * row + 4, "text-anchor": "end" }, shorten(name))));
  const scale = (column) => (column + 0.5) * wide;
  axisBelow(chart, scale, ticks(0, columns - 1, chart.width / 60, true), write, title);
  hover(chart, (px, py) => {
    const [column, rank] = [Math.min(columns - 1, Math.floor(px / wide)), Math.min(order.length - 1, Math.floor(py / row))];
    if (column < 0 || rank < 0) return null;
    return { tip: tip(order[rank], column), client: names[rank], outline: [node("rect", { x: column * wide, y: rank * row, width: wide, height: Math.max(1, row) })] };
  }, { x: wide, y: row });
}

views.push({
  id: "clusters",
  title: "Clusters over rounds",
  about: () => `The cluster of each client; pale where it did not take part.${run().clusters?.renumbered ? " Clients are clustered in every round; clusters are numbered so that as many clients as possible keep their number." : ""}`,
  missing: () => (run().clusters ? null : `${runName(run())} has no clusters, or only one.`),
  draw: (figure) => {
    const { of } = run().clusters;
    const lasts = run().clients.map((_, index) => of.findLast((row) => row[index] >= 0)?.[index] ?? -1);
    const order = lasts.map((_, index) => index).sort((a, b) => lasts[a] - lasts[b] || a - b);
    const count = 1 + of.reduce((most, row) => largest(row, most), 0);
    drawGrid(figure, {
      order,
      columns: of.length,
      value: (index, column) => of[column][index],
      paint: clusterColor,
      group: (index) => (lasts[index] < 0 ? "none" : `cluster ${lasts[index]}`),
      legend: Array.from({ length: count }, (_, k) => ({ label: `cluster ${k}`, color: clusterColor(k) })),
      label: "cluster of every client over rounds",
      write: (column) => `${column}`,
      title: "round",
      numbered: true,
      tip: (index, column) => `${clientName(index)}, round ${column}: ${of[column][index] < 0 ? "did not take part" : `cluster ${of[column][index]}`}`,
    });
  },
  csv: () => [["round", ...run().clients.map((name) => `client ${name}`)], ...run().clusters.of.map((row, t) => [t, ...row.map((cluster) => (cluster < 0 ? null : cluster))])],
});
