// Who gained and who lost by joining: the gain of every client over training alone, with its interval, sorted.

const comparison = () => {
  const { compared } = family().gain;
  return compared.find(({ key }) => key === state.against) ?? compared[0];
};
const side = (client) => SIDES[client.side];

function gainRows() {
  const clients = comparison().clients.filter((client) => run().clients.includes(client.client));
  return [...clients].sort((a, b) => (a.gain ?? -Infinity) - (b.gain ?? -Infinity));
}

function gainTable() {
  const columns = [{ title: "client" }, ...["gain", "low", "high", "here", "alone", "most frequent label", "test samples"].map((title) => ({ title, number: true })), { title: "model alone" }, { title: "beyond chance" }, { title: "by itself" }];
  const rows = gainRows().map((c) => ({ client: c.client, cells: [c.client, [points(c.gain), c.gain], [points(c.low), c.low], [points(c.high), c.high], [written(c.value), c.value], [written(c.alone), c.alone], [written(c.constant), c.constant], [`${c.samples}`, c.samples], c.arch, c.side, c.label] }));
  const none = rows.every(({ cells }) => !known(cells[6][1]));
  const kept = (list) => (none ? list.filter((_, i) => i !== 6) : list);
  return { columns: kept(columns), rows: rows.map((row) => ({ ...row, cells: kept(row.cells) })) };
}

views.push({
  id: "gain",
  title: "Gain over training alone",
  about: () => {
    const { words, over } = comparison();
    return `${words} A bar is the 95 % interval of a client's gain on its own test samples${over ? `, over ${over}` : ""}. The colour and the mark say what remains beyond chance after correction for the number of clients (Holm).`;
  },
  controls: () => {
    const { compared } = family().gain;
    return compared.length > 1 ? [picker("against", Object.fromEntries(compared.map(({ key, against }) => [key, against])), "Compared with", comparison().key)] : [];
  },
  missing: () => (family().gain.missing === null ? null : `${family().label}: ${family().gain.missing}`),
  draw: (figure) => {
    const { alarms } = comparison();
    if (alarms.length) figure.append(element("ul", { class: "alarms" }, ...alarms.map((line) => element("li", {}, line))));
    const clients = gainRows();
    const drawn = clients.filter(({ gain }) => known(gain));
    const of = new Map(clients.map((client) => [run().clients.indexOf(client.client), client]));
    const order = drawn.map(({ client }) => run().clients.indexOf(client));
    const shown = order.length > FEW ? extremes(order).flatMap((part) => part.order.map((index) => of.get(index))) : drawn;
    const ends = [...drawn.map(({ gain }) => gain), ...shown.flatMap(({ low, high }) => [low, high])].filter(known);
    const small = isPercent(headline) ? 0.02 : largest(ends.map(Math.abs), 0) * 0.1 || 1e-3;
    const [low, high] = [smallest(ends, -small) * 1.05, largest(ends, small) * 1.05];
    const sides = Object.entries(SIDES).map(([name, [color, shape]]) => ({ name, color, shape, label: `${name} (${clients.filter((client) => client.side === name).length.toLocaleString("en")})` }));
    drawRows(figure, {
      order,
      series: sides.map(({ name, color, label }) => ({ label, color, values: drawn.filter((client) => client.side === name).map(({ gain }) => gain) })),
      low,
      high,
      write: (value) => `${value > 0 ? "+" : ""}${bare(value)}`,
      axis: `${isPercent(headline) ? "points of " : "gain in "}${titles()[headline]}, right is better`,
      legend: sides,
      label: `gain of every client over training alone, with 95 % intervals, sorted: ${sides.map(({ label }) => label).join(", ")}`,
      side: { title: "samples", text: (index) => `${of.get(index).samples}` },
      row: (group, index, x, y) => {
        const client = of.get(index);
        const [color, shape] = side(client);
        // An interval without an end goes to the edge of the chart; one that is not known is left out.
        if (known(client.low) || known(client.high)) group.append(node("line", { class: "interval", x1: x(client.low ?? low), x2: x(client.high ?? high), y1: y, y2: y, stroke: color, "stroke-width": 2 }));
        group.append(mark(shape, x(client.gain), y, 4.6, { color, class: "own halo" }));
      },
      tip: (index, rank) => {
        const client = of.get(index);
        const interval = known(client.low) || known(client.high) ? `\n95 % interval ${points(client.low)} to ${points(client.high)}: ${client.label}` : "";
        return `${clientName(index)}, ${rank + 1} of ${order.length}: ${points(client.gain)}${unit()}, ${client.side}${interval}\nhere ${written(client.value)}, alone ${written(client.alone)} (${client.arch}), ${many(client.samples, "test sample")}`;
      },
    });
    figure.append(fold("gain", "As a table", () => {
      const { columns, rows } = gainTable();
      return dataTable("gain", "gain of every client", columns, rows);
    }));
  },
  csv: () => {
    const { columns, rows } = gainTable();
    return tableCsv(columns, rows);
  },
});
