// Samples per client and label as a heat map; clients with similar labels stand side by side.

const SHADES = 8;
const shade = (count, most) => Math.max(1, Math.round(SHADES * Math.sqrt(count / most)));
const shadeOpacity = (level) => 0.1 + (0.9 * level) / SHADES;

views.push({
  id: "labels",
  title: "Labels per client",
  about: () => "The stronger the colour of a cell, the more samples of a label the client has: training, validation and test together. Clients with similar labels stand side by side.",
  missing: () => (run().labels ? null : "this run has no label counts."),
  draw: (figure) => {
    const { classes, counts, parts, order } = run().labels;
    const names = order.map((index) => run().clients[index]);
    const left = 14 + labelWidth(classes);
    const step = (Math.max(280, figure.clientWidth) - left - 14) / names.length;
    const row = classes.length > 80 ? 900 / classes.length : Math.max(SPACE - 1, Math.min(24, 460 / classes.length));
    const most = counts.reduce((most, of) => largest(of, most), 1);
    const legend = [1, most / 4, most].map(Math.ceil).filter((count, i, all) => all.indexOf(count) === i).map((count) => ({ label: many(count, "sample"), color: "var(--shade)", opacity: shadeOpacity(shade(count, most)) }));
    const chart = frame(figure, { height: row * classes.length, left, top: 6, bottom: heightOfNames(names, step), label: `samples per client and label: ${many(names.length, "client")}, ${classes.length} labels`, legend });
    const wide = chart.width / names.length;
    chart.plot.append(node("rect", { class: "none", x: 0, y: 0, width: chart.width, height: chart.height, "fill-opacity": 0.5 }));
    namesBelow(chart, names, (rank) => (rank + 0.5) * wide, wide);
    classes.forEach((name, k) => {
      if (k % everyNth(row + 1) === 0) chart.plot.append(node("text", { class: "soft small", x: -6, y: (k + 0.5) * row + 4, "text-anchor": "end" }, shorten(name)));
    });
    const gap = Math.min(1, wide / 6, row / 6);
    const filled = cells();
    order.forEach((index, rank) =>
      classes.forEach((_, k) => {
        const count = counts[index][k];
        if (count) filled.add(`${shade(count, most)}${dim(index)}`, rank * wide, k * row, wide - gap, row - gap);
      }),
    );
    chart.plot.append(...filled.paths((key) => ({ class: `heat${key.endsWith("dim") ? " dim" : ""}`, fill: "var(--shade)", "fill-opacity": shadeOpacity(parseInt(key, 10)) })));
    hover(chart, (px, py) => {
      const rank = Math.min(names.length - 1, Math.floor(px / wide));
      const k = Math.min(classes.length - 1, Math.floor(py / row));
      if (rank < 0 || k < 0) return null;
      const index = order[rank];
      const total = counts[index].reduce((a, b) => a + b, 0);
      const [train, val, test] = parts[index];
      return { tip: `${clientName(index)}: ${counts[index][k]} with label ${classes[k]}\n${total} samples in total: ${train} training, ${val} validation, ${test} test`, client: names[rank], outline: [node("rect", { x: rank * wide, y: 0, width: wide, height: chart.height }), node("rect", { x: rank * wide, y: k * row, width: wide, height: row })] };
    }, { x: wide, y: row });
  },
  csv: () => {
    const { classes, counts, parts } = run().labels;
    return [["client", "train", "val", "test", ...classes.map((name) => `label ${name}`)], ...run().clients.map((name, index) => [name, ...parts[index], ...counts[index]])];
  },
});
