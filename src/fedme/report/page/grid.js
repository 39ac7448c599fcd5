// Clients by rounds: architectures and clusters. And the number of clients per architecture.

// `value(row, column)` is the number of a colour, or -1; equal neighbours are drawn as one.
function drawGrid(figure, { order, columns, value, legend, label, tip, marked, write, title }) {
  const names = order.map((index) => run().clients[index]);
  const left = 16 + labelWidth(names);
  const row = Math.max(3, Math.min(20, 420 / order.length));
  const chart = frame(figure, { height: row * order.length, left, top: 8, label, legend });
  const wide = chart.width / columns;
  order.forEach((index, rank) => {
    if (row >= 9) chart.plot.append(node("text", { class: state.client === names[rank] ? "warn small" : "soft small", x: -6, y: (rank + 0.5) * row + 3.5, "text-anchor": "end" }, shorten(names[rank])));
    for (let from = 0; from < columns; ) {
      let to = from + 1;
      while (to < columns && value(index, to) === value(index, from)) to += 1;
      const number = value(index, from);
      chart.plot.append(node("rect", { class: `cell${number < 0 ? " none" : ""}${dim(index)}`, x: from * wide, y: rank * row, width: (to - from) * wide, height: row - (row > 5 ? 1 : 0), fill: number < 0 ? null : color(number) }));
      from = to;
    }
    if (marked && wide > 3) for (let column = 0; column < columns; column += 1)
      if (marked(index, column)) chart.plot.append(node("circle", { class: state.client === null || names[rank] === state.client ? null : "dim", cx: (column + 0.5) * wide, cy: (rank + 0.5) * row - 0.5, r: Math.min(2.5, row * 0.25, wide * 0.3), fill: "var(--card)" }));
  });
  const scale = (column) => (column + 0.5) * wide;
  axisBelow(chart, scale, ticks(0, columns - 1, chart.width / 60, true), write, title);
  hover(chart, (px, py) => {
    const [column, rank] = [Math.min(columns - 1, Math.floor(px / wide)), Math.min(order.length - 1, Math.floor(py / row))];
    if (column < 0 || rank < 0) return null;
    return { tip: tip(order[rank], column), client: names[rank], outline: [node("rect", { x: column * wide, y: rank * row, width: wide, height: row })] };
  });
}

const moment = (column) => (column === 0 ? "at the start" : `after round ${column - 1}`);
const oneArchitecture = () => (run().lineage.names.length > 1 ? null : `Every client of ${runName(run())} holds ${run().lineage.names[0]} in all rounds.`);

views.push({
  id: "lineage",
  title: "Architecture per client",
  about: () => `One row per client, sorted by the final architecture; the first column is the start.${run().exchange ? " A dot marks a round in which the client adopted the borrowed model." : ""}${truncationNote()}`,
  missing: oneArchitecture,
  draw: (figure) => {
    const { names, held, began } = run().lineage;
    const order = shownClients().sort((a, b) => held.at(-1)[a] - held.at(-1)[b] || began.at(-1)[a] - began.at(-1)[b] || a - b);
    const exchange = run().exchange;
    drawGrid(figure, {
      order,
      columns: held.length,
      value: (index, column) => held[column][index],
      legend: names.map((name, k) => ({ label: name, color: color(k) })),
      label: "architecture of every client over rounds",
      marked: exchange && ((index, column) => column > 0 && exchange.adopted[column - 1][index]),
      write: (column) => (column === 0 ? "start" : `${column - 1}`),
      title: "round",
      tip: (index, column) => {
        const rows = [`${clientName(index)} ${moment(column)}: ${names[held[column][index]] ?? "unknown"}`];
        if (exchange) rows.push(began[column][index] === index ? "descends from its own initial model" : `descends from the initial model of ${run().clients[began[column][index]]}`);
        if (exchange && column > 0 && exchange.adopted[column - 1][index]) rows.push(`adopted from ${run().clients[exchange.lenders[column - 1][index]]}`);
        return rows.join("\n");
      },
    });
  },
});

views.push({
  id: "shares",
  title: "Architectures over rounds",
  about: () => "Number of clients per architecture, and how many change from one to another between rounds. An architecture that no client holds cannot come back.",
  missing: oneArchitecture,
  draw: (figure) => {
    const { names, held } = run().lineage;
    const chart = frame(figure, { height: 190, label: "number of clients per architecture", legend: names.map((name, k) => ({ label: name, color: color(k) })) });
    const total = run().clients.length;
    const wide = chart.width / held.length;
    const y = linear([0, total], [chart.height, 0]);
    const counts = held.map((row) => names.map((_, k) => row.filter((arch) => arch === k).length));
    axisLeft(chart, y, ticks(0, total, 5, true), (value) => `${value}`, "clients");
    const flowing = wide >= 12; // wide enough for streams between the bars
    const bar = flowing ? Math.min(26, wide * 0.45) : Math.max(0.5, wide - (wide > 5 ? 1 : 0));
    const from = (column) => column * wide + (flowing ? (wide - bar) / 2 : 0);
    const flows = held.slice(1).map((row, column) => names.map((_, k) => names.map((_, m) => row.filter((arch, index) => arch === m && held[column][index] === k).length)));
    const stacked = (values) => values.map((_, k) => values.slice(0, k).reduce((sum, value) => sum + value, 0));
    counts.forEach((row, column) => {
      const below = stacked(row);
      row.forEach((count, k) => {
        if (count) chart.plot.append(node("rect", { class: "bar", x: from(column), width: bar, y: y(below[k] + count), height: y(below[k]) - y(below[k] + count), fill: color(k) }));
      });
      if (!flowing || column + 1 === held.length) return;
      const [leaves, arrives] = [[...below], stacked(counts[column + 1])];
      const [x1, x2] = [from(column) + bar, from(column + 1)];
      const middle = (x1 + x2) / 2;
      names.forEach((_, k) => names.forEach((_, m) => {
        const count = flows[column][k][m];
        if (!count) return;
        const [a, b] = [[y(leaves[k] + count), y(leaves[k])], [y(arrives[m] + count), y(arrives[m])]];
        chart.plot.append(node("path", { class: "stream", d: `M${x1},${a[0]}C${middle},${a[0]} ${middle},${b[0]} ${x2},${b[0]}L${x2},${b[1]}C${middle},${b[1]} ${middle},${a[1]} ${x1},${a[1]}Z`, fill: color(k) }));
        leaves[k] += count;
        arrives[m] += count;
      }));
    });
    axisBelow(chart, (column) => (column + 0.5) * wide, ticks(0, held.length - 1, chart.width / 60, true), (column) => (column === 0 ? "start" : `${column - 1}`), "round");
    hover(chart, (px) => {
      const column = Math.min(held.length - 1, Math.max(0, Math.floor(px / wide)));
      const rows = names.map((name, k) => `${name}: ${counts[column][k]}`).filter((_, k) => counts[column][k]);
      const moves = column === 0 ? [] : names.flatMap((before, k) => names.map((after, m) => (k !== m && flows[column - 1][k][m] ? `${flows[column - 1][k][m]} changed from ${before} to ${after}` : "")).filter(Boolean));
      return { tip: [moment(column), ...rows, ...moves].join("\n"), outline: [node("rect", { x: column * wide, y: 0, width: wide, height: chart.height })] };
    });
  },
});

views.push({
  id: "clusters",
  title: "Clusters over rounds",
  about: () => `The cluster of each client; pale where it did not take part.${run().clusters?.renumbered ? " Clients are clustered in every round; clusters are numbered so that as many clients as possible keep their number." : ""}${truncationNote()}`,
  missing: () => (run().clusters ? null : `${runName(run())} has no clusters, or only one.`),
  draw: (figure) => {
    const { of } = run().clusters;
    const last = (index) => of.findLast((row) => row[index] >= 0)?.[index] ?? -1;
    const order = shownClients().sort((a, b) => last(a) - last(b) || a - b);
    const count = 1 + of.flat().reduce((most, cluster) => Math.max(most, cluster), 0);
    drawGrid(figure, {
      order,
      columns: of.length,
      value: (index, column) => of[column][index],
      legend: Array.from({ length: count }, (_, k) => ({ label: `cluster ${k}`, color: color(k) })),
      label: "cluster of every client over rounds",
      write: (column) => `${column}`,
      title: "round",
      tip: (index, column) => `${clientName(index)}, round ${column}: ${of[column][index] < 0 ? "did not take part" : `cluster ${of[column][index]}`}`,
    });
  },
});
