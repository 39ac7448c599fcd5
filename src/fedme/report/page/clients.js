// The result of every client's personal model, sorted, beside other runs with the same clients.

const stages = () => ({ round: "after the last round", ...(run().results[`${state.split} finetuned`] ? { finetuned: "after fine-tuning" } : {}) });
const results = (run, stage) => run.results[`${state.split} ${stage}`] ?? run.results[`${state.split} round`];
const intervals = (run, stage) => run.intervals[`${state.split} ${stage}`] ?? run.intervals[`${state.split} round`] ?? [];
const sorted = (values) => values.map((_, index) => index).filter((index) => known(values[index])).sort((a, b) => values[a] - values[b]);
const ranked = (values) => (higher() ? sorted(values) : sorted(values).reverse()); // worst first

// Other runs with the same clients and samples; of several seeds of a family there is at most one.
function otherRuns() {
  const others = run().comparable.map((index) => story.runs[index]).filter((other) => results(other, state.stage));
  const places = new Map(others.map((other) => [other, new Map(other.clients.map((name, i) => [name, i]))]));
  const scoreIn = (other, index) => results(other, state.stage)[places.get(other).get(run().clients[index])] ?? null;
  return { others, scoreIn };
}

function clientTable() {
  const { others, scoreIn } = otherRuns();
  const values = results(run(), state.stage);
  const spans = intervals(run(), state.stage);
  const { names, held } = run().lineage;
  const majority = run().majority.some(known);
  const columns = [{ title: "client" }, { title: runName(run()), number: true }, ...(spans.some(known) ? [{ title: "95 % low", number: true }, { title: "95 % high", number: true }] : []), ...others.map((other) => ({ title: runName(other), number: true })), ...(majority ? [{ title: "most frequent label", number: true }] : []), { title: "test samples", number: true }, { title: "architecture" }];
  const cell = (value) => [written(value), value];
  const rows = ranked(values).map((index) => ({
    client: run().clients[index],
    cells: [run().clients[index], cell(values[index]), ...(spans.some(known) ? [cell(spans[index]?.[0]), cell(spans[index]?.[1])] : []), ...others.map((other) => cell(scoreIn(other, index))), ...(majority ? [cell(run().majority[index])] : []), [`${run().samples[index] ?? "–"}`, run().samples[index]], names[held.at(-1)[index]] ?? ""],
  }));
  return { columns, rows };
}

views.push({
  id: "clients",
  title: "Results per client",
  about: () => {
    const values = results(run(), state.stage) ?? [];
    const worst = ranked(values).slice(0, 3).map((index) => `${run().clients[index]} (${written(values[index])})`);
    const span = intervals(run(), state.stage).some(known) ? " A bar is the 95 % interval that the number of samples allows." : "";
    return `${capital(titles()[headline])} of each client's personal model in ${runName(run())}, sorted. The worst: ${worst.join(", ")}.${span}${run().comparable.length ? " Open marks are other runs with the same clients." : ""}`;
  },
  controls: () => [picker("split", story.curves.splits, "Samples"), picker("stage", stages(), "Models")],
  missing: () => (results(run(), state.stage)?.some(known) ? null : "This run has no results per client on these samples."),
  draw: (figure) => {
    const values = results(run(), state.stage);
    const spans = intervals(run(), state.stage);
    const { others, scoreIn } = otherRuns();
    const order = ranked(values);
    const shown = extremes(order).flatMap((part) => part.order);
    const majority = run().majority;
    const all = [...order.flatMap((index) => [values[index], ...others.map((other) => scoreIn(other, index))]), ...shown.flatMap((index) => [...(spans[index] ?? []), majority[index]])].filter(known);
    const pad = isPercent(headline) ? 0.02 : (largest(all) - smallest(all) || Math.abs(all[0]) || 1) * 0.08;
    const low = Math.max(0, smallest(all) - pad);
    const high = isPercent(headline) ? Math.min(1, largest(all) + pad) : largest(all) + pad;
    const own = run().family;
    const crowd = order.length > FEW;
    const look = (other, open) => ({ label: runName(other), color: runColor(other.family), shape: crowd && !open ? "swatch" : runMark(other.family), open, line: crowd && open, dash: lineDash(other.family), opacity: crowd ? 0.55 : 1 });
    drawRows(figure, {
      order,
      outlined: true,
      series: [run(), ...others].map((other) => ({ label: runName(other), color: runColor(other.family), dash: lineDash(other.family), values: order.map((index) => (other === run() ? values[index] : scoreIn(other, index))) })),
      low,
      high,
      write: (value) => bare(value),
      axis: `${titles()[headline]}${isPercent(headline) ? ", %" : higher() ? "" : ", lower is better"}`,
      legend: [look(run(), false), ...others.map((other) => look(other, true)), ...(shown.some((index) => known(majority[index])) ? [{ label: "always the most frequent label", color: "var(--soft)", shape: "tick" }] : [])],
      label: `${titles()[headline]} of every client, sorted`,
      side: { title: "samples", text: (index) => `${run().samples[index] ?? "–"}` },
      row: (group, index, x, y, half) => {
        const there = others.map((other) => scoreIn(other, index)).filter(known);
        const ends = [values[index], ...there];
        if (there.length) group.append(node("line", { class: "rule", x1: x(smallest(ends)), x2: x(largest(ends)), y1: y, y2: y, "stroke-width": 1.5 }));
        if (spans[index]) group.append(node("line", { class: "interval", x1: x(spans[index][0]), x2: x(spans[index][1]), y1: y, y2: y, stroke: runColor(own), "stroke-width": 1.5 }));
        if (known(majority[index])) group.append(node("line", { class: "majority", x1: x(majority[index]), x2: x(majority[index]), y1: y - half + 2, y2: y + half - 2, stroke: "var(--soft)", "stroke-width": 2 }));
        // Equal values stand above each other instead of hiding each other.
        others.forEach((other, k) => {
          const value = scoreIn(other, index);
          if (!known(value)) return;
          const shift = others.length > 1 ? (k / (others.length - 1) - 0.5) * half : half * 0.45;
          group.append(mark(runMark(other.family), x(value), y + shift, 3.4, { color: runColor(other.family), open: true, class: "other" }));
        });
        group.append(mark(runMark(own), x(values[index]), others.length === 1 ? y - half * 0.25 : y, 4.4, { color: runColor(own), class: "own halo" }));
      },
      tip: (index, rank) => {
        const rows = others.map((other) => `${runName(other)}: ${written(scoreIn(other, index))}`);
        const samples = state.split === "test" && run().samples[index] ? ` of ${run().samples[index]} samples` : "";
        const span = spans[index] ? `\n95 % interval ${written(spans[index][0])} to ${written(spans[index][1])}` : "";
        const always = known(majority[index]) ? [`always the most frequent label: ${written(majority[index])}`] : [];
        return [`${clientName(index)}, ${rank + 1} of ${order.length}`, `${runName(run())}: ${written(values[index])}${samples}${span}`, ...rows, ...always].join("\n");
      },
    });
    figure.append(fold("clients", "As a table", () => {
      const { columns, rows } = clientTable();
      return dataTable("clients", "results of every client", columns, rows);
    }));
  },
  csv: () => {
    const { columns, rows } = clientTable();
    return tableCsv(columns, rows);
  },
});
