// Samples per client and label: the area of a bubble is a count.

views.push({
  id: "labels",
  title: "Labels per client",
  about: () => `The area of a bubble is the number of samples: training, validation and test together.${truncationNote()}`,
  missing: () => (run().labels ? null : "This run has no label counts."),
  draw: (figure) => {
    const { classes, counts, parts } = run().labels;
    const names = run().clients.slice(0, MAX_CLIENTS);
    const left = 14 + labelWidth(classes);
    const step = (Math.max(280, figure.clientWidth) - left - 14) / names.length;
    const row = Math.max(9, Math.min(24, 460 / classes.length));
    const chart = frame(figure, { height: row * classes.length, left, top: 6, bottom: heightOfNames(names, step), label: "samples per client and label" });
    const wide = chart.width / names.length;
    namesBelow(chart, names, (index) => (index + 0.5) * wide, wide);
    const most = names.reduce((most, _, index) => Math.max(most, ...counts[index]), 1);
    const largest = Math.max(1.5, Math.min(row, Math.max(wide, 9)) / 2 - 0.5);
    classes.forEach((name, k) => {
      chart.plot.append(node("line", { class: "rule", x1: 0, x2: chart.width, y1: (k + 0.5) * row, y2: (k + 0.5) * row }));
      chart.plot.append(node("text", { class: "soft small", x: -6, y: (k + 0.5) * row + 3.5, "text-anchor": "end" }, shorten(name)));
    });
    names.forEach((_, index) =>
      classes.forEach((_, k) => {
        const count = counts[index][k];
        if (count) chart.plot.append(node("circle", { class: `bubble${dim(index)}`, cx: (index + 0.5) * wide, cy: (k + 0.5) * row, r: Math.max(0.7, largest * Math.sqrt(count / most)), fill: color(0) }));
      }),
    );
    hover(chart, (px, py) => {
      const index = Math.min(names.length - 1, Math.floor(px / wide));
      const k = Math.min(classes.length - 1, Math.floor(py / row));
      if (index < 0 || k < 0) return null;
      const total = counts[index].reduce((a, b) => a + b, 0);
      const [train, val, test] = parts[index];
      return { tip: `${clientName(index)}: ${counts[index][k]} with label ${classes[k]}\n${total} samples in total: ${train} training, ${val} validation, ${test} test`, client: names[index], outline: [node("rect", { x: index * wide, y: 0, width: wide, height: chart.height })] };
    });
  },
});
