// Does joining help? The gain of every client over training alone, with its interval, sorted.

const verdictColors = { join: "var(--c2)", "do not join": "var(--warn)", "cannot tell": "var(--c7)" };

views.push({
  id: "joining",
  title: "Does joining help?",
  about: () => {
    const { summary, over } = run().joining;
    return `${summary} A line is a 95 % interval of the gain on the client's own test samples${over ? `, over ${over}` : ""}: above 0 joining helps, below 0 it hurts.`;
  },
  missing: () => (run().joining.missing === null ? null : `${runName(run())}: ${run().joining.missing}`),
  draw: (figure) => {
    const { alarms, clients } = run().joining;
    if (alarms.length) figure.append(element("ul", { class: "alarms" }, ...alarms.map((line) => element("li", {}, line))));
    const order = sorted(clients.map((client) => client?.gain));
    const legend = Object.keys(verdictColors).map((decision) => [decision, order.filter((index) => clients[index].decision === decision).length]).filter(([, count]) => count).map(([decision, count]) => ({ label: `${decision} (${count})`, color: verdictColors[decision], shape: "dot" }));
    const { chart, step, place } = columns(figure, order, { label: "gain of every client over training alone, with 95 % intervals, sorted", legend });
    const ends = order.flatMap((index) => [clients[index].low, clients[index].gain, clients[index].high]).filter((value) => value !== null);
    const small = isPercent(headline) ? 0.01 : Math.max(...ends.map(Math.abs)) * 0.1 || 1e-3;
    const [low, high] = [Math.min(-small, ...ends) * 1.05, Math.max(small, ...ends) * 1.05];
    const y = linear([low, high], [chart.height, 0]);
    axisLeft(chart, y, ticks(low, high, 5), (value) => bare(value), `${isPercent(headline) ? "points of " : "gain in "}${titles()[headline]}`);
    chart.plot.append(node("line", { class: "axis", x1: 0, x2: chart.width, y1: y(0), y2: y(0) }));
    const wide = Math.min(5, Math.max(1, step * 0.4));
    order.forEach((index, rank) => {
      const client = clients[index];
      const at = place(rank);
      const fill = verdictColors[client.decision];
      // An interval without an end goes to the edge of the chart.
      chart.plot.append(node("line", { class: `interval${dim(index)}`, x1: at, x2: at, y1: y(client.low ?? low), y2: y(client.high ?? high), stroke: fill, "stroke-width": Math.min(3, Math.max(0.6, step * 0.3)) }));
      chart.plot.append(node("circle", { class: `dot own${step > 8 ? " halo" : ""}${dim(index)}`, cx: at, cy: y(client.gain), r: wide, fill }));
    });
    hover(chart, (px) => {
      const rank = Math.min(order.length - 1, Math.max(0, Math.floor(px / step)));
      const index = order[rank];
      if (index === undefined) return null;
      const client = clients[index];
      return { tip: `${clientName(index)}: ${client.words}\nfederated ${written(client.value)}, alone ${written(client.alone)} (${client.arch}), constant ${written(client.constant)}`, client: run().clients[index], outline: [node("rect", { x: place(rank) - step / 2, width: step, y: 0, height: chart.height })] };
    });
    figure.append(joiningTable(clients, order));
  },
});

function joiningTable(clients, order) {
  const head = ["client", "test samples", "federated", "alone", "constant", "gain", "95 % interval", "best alone", "verdict"];
  const text = (index) => index === 0 || index > 6;
  const rest = clients.map((_, index) => index).filter((index) => clients[index] !== null && !order.includes(index)); // a model diverged
  const rows = [...order, ...rest].map((index) => {
    const client = clients[index];
    const end = (value) => (value === null ? "unknown" : points(value));
    const cells = [run().clients[index], client.samples, written(client.value), written(client.alone), written(client.constant), end(client.gain), `${end(client.low)} to ${end(client.high)}`, client.arch, client.label];
    return element("tr", { class: state.client === run().clients[index] ? "on" : null }, ...cells.map((cell, i) => element("td", { class: text(i) ? null : "number" }, cell)));
  });
  const header = element("tr", {}, ...head.map((title, i) => element("th", { class: text(i) ? null : "number" }, title)));
  return element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroll" }, element("table", {}, header, ...rows)));
}
