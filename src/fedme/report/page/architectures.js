// Architectures: of every client, and how many clients hold each of them.

const moment = (column) => (column === 0 ? "at the start" : `after round ${column - 1}`);
const oneArchitecture = () => (run().lineage.names.length > 1 ? null : `every client of ${runName(run())} holds ${run().lineage.names[0]} in all rounds.`);

function compareHistories(held, a, b) {
  const column = held.findIndex((row) => row[a] !== row[b]);
  return column < 0 ? 0 : held[column][a] - held[column][b];
}

views.push({
  id: "lineage",
  title: "Architecture per client",
  about: () => `One row per client, sorted by the final architecture, then by the earlier ones; the first column is the start.${run().exchange && fewClients() ? " A dot marks a round in which the client adopted the borrowed model." : ""}`,
  missing: oneArchitecture,
  draw: (figure) => {
    const { names, held, began } = run().lineage;
    const order = run().clients.map((_, index) => index).sort((a, b) => held.at(-1)[a] - held.at(-1)[b] || compareHistories(held, a, b) || a - b);
    const exchange = run().exchange;
    drawGrid(figure, {
      order,
      columns: held.length,
      value: (index, column) => held[column][index],
      paint: archColor,
      group: (index) => names[held.at(-1)[index]] ?? "unknown",
      legend: names.map((name, k) => ({ label: name, color: archColor(k) })),
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
  csv: () => {
    const { names, held, began } = run().lineage;
    const rows = held.flatMap((row, column) => row.map((arch, index) => [column === 0 ? "start" : column - 1, run().clients[index], names[arch] ?? "", run().clients[began[column][index]], column === 0 ? 0 : (run().exchange?.adopted[column - 1][index] ?? 0)]));
    return [["after round", "client", "architecture", "descends from", "adopted"], ...rows];
  },
});

views.push({
  id: "shares",
  title: "Architectures over rounds",
  about: () => "Number of clients per architecture, and how many change from one to another between rounds. An architecture that no client holds cannot come back.",
  missing: oneArchitecture,
  draw: (figure) => {
    const { names, held } = run().lineage;
    const chart = frame(figure, { height: 190, label: "number of clients per architecture", legend: names.map((name, k) => ({ label: name, color: archColor(k) })), right: 14 + labelWidth(names) + 8 });
    const total = run().clients.length;
    const wide = chart.width / held.length;
    const y = linear([0, total], [chart.height, 0]);
    const counts = held.map((row) => names.map((_, k) => row.filter((arch) => arch === k).length));
    axisLeft(chart, y, ticks(0, total, 5, true), (value) => `${value}`, "clients");
    const flowing = wide >= 12; // wide enough for streams between the bars
    const bar = flowing ? Math.min(26, wide * 0.3) : Math.max(0.5, wide - (wide > 5 ? 1 : 0));
    const from = (column) => column * wide + (flowing ? (wide - bar) / 2 : 0);
    const flows = held.slice(1).map((row, column) => names.map((_, k) => names.map((_, m) => row.filter((arch, index) => arch === m && held[column][index] === k).length)));
    const stacked = (values) => values.map((_, k) => values.slice(0, k).reduce((sum, value) => sum + value, 0));
    counts.forEach((row, column) => {
      const below = stacked(row);
      row.forEach((count, k) => {
        if (count) chart.plot.append(node("rect", { class: "bar", x: from(column), width: bar, y: y(below[k] + count), height: y(below[k]) - y(below[k] + count), fill: archColor(k) }));
      });
      if (!flowing || column + 1 === held.length) return;
      const [leaves, arrives] = [[...below], stacked(counts[column + 1])];
      const [x1, x2] = [from(column) + bar, from(column + 1)];
      const middle = (x1 + x2) / 2;
      names.forEach((_, k) => names.forEach((_, m) => {
        const count = flows[column][k][m];
        if (!count) return;
        const [a, b] = [[y(leaves[k] + count), y(leaves[k])], [y(arrives[m] + count), y(arrives[m])]];
        chart.plot.append(node("path", { class: "stream", d: `M${x1},${a[0]}C${middle},${a[0]} ${middle},${b[0]} ${x2},${b[0]}L${x2},${b[1]}C${middle},${b[1]} ${middle},${a[1]} ${x1},${a[1]}Z`, fill: archColor(k) }));
        leaves[k] += count;
        arrives[m] += count;
      }));
    });
    // Names beside the last bars, so that colours need no looking up.
    const heights = stacked(counts.at(-1));
    counts.at(-1).forEach((count, k) => {
      const [top, bottom] = [y(heights[k] + count), y(heights[k])];
      if (bottom - top >= 10) chart.plot.append(node("text", { class: "soft small", x: chart.width + 6 - (flowing ? (wide - bar) / 2 : 0), y: (top + bottom) / 2 + 4 }, shorten(names[k])));
    });
    axisBelow(chart, (column) => (column + 0.5) * wide, ticks(0, held.length - 1, chart.width / 60, true), (column) => (column === 0 ? "start" : `${column - 1}`), "round");
    hover(chart, (px) => {
      const column = Math.min(held.length - 1, Math.max(0, Math.floor(px / wide)));
      const rows = names.map((name, k) => `${name}: ${counts[column][k]}`).filter((_, k) => counts[column][k]);
      const moves = column === 0 ? [] : names.flatMap((before, k) => names.map((after, m) => (k !== m && flows[column - 1][k][m] ? `${flows[column - 1][k][m]} changed from ${before} to ${after}` : "")).filter(Boolean));
      return { tip: [moment(column), ...rows, ...moves].join("\n"), outline: [node("rect", { x: column * wide, y: 0, width: wide, height: chart.height })] };
    }, { x: wide, y: 12 });
  },
  csv: () => {
    const { names, held } = run().lineage;
    return [["after round", ...names], ...held.map((row, column) => [column === 0 ? "start" : column - 1, ...names.map((_, k) => row.filter((arch) => arch === k).length)])];
  },
});
