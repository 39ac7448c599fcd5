// Clients sorted by the results of their models, and by their gain over local training.

const stages = () => ({ round: "after the last round", ...(run().results[`${state.split} finetuned`] ? { finetuned: "after fine-tuning" } : {}) });
const results = (run, stage) => run.results[`${state.split} ${stage}`] ?? run.results[`${state.split} round`];
const sorted = (values) => values.map((_, index) => index).filter((index) => values[index] !== null && values[index] !== undefined).sort((a, b) => values[a] - values[b]);
const ranked = (values) => (higher() ? sorted(values) : sorted(values).reverse()); // worst first
const dim = (index) => (state.client !== null && run().clients[index] !== state.client ? " dim" : "");

function columns(figure, order, options) {
  const names = order.map((index) => run().clients[index]);
  const guess = (Math.max(280, figure.clientWidth) - 60) / Math.max(1, order.length);
  const chart = frame(figure, { height: 230, bottom: heightOfNames(names, guess), ...options });
  const step = chart.width / Math.max(1, order.length);
  const place = (rank) => (rank + 0.5) * step;
  namesBelow(chart, names, place, step);
  return { chart, step, place };
}

views.push({
  id: "clients",
  title: "Results per client",
  about: () => {
    const values = results(run(), state.stage) ?? [];
    const worst = ranked(values).slice(0, 3).map((index) => `${run().clients[index]} (${written(values[index])})`);
    return `${capital(titles()[headline])} of each client's personal model in ${runName(run())}, sorted. The worst: ${worst.join(", ")}. ${run().comparable.length ? "Small dots are the other runs with the same clients." : ""}`;
  },
  controls: () => [picker("split", story.curves.splits, "Samples"), picker("stage", stages(), "Models")],
  missing: () => (results(run(), state.stage) ? null : "This run has no results per client on these samples."),
  draw: (figure) => {
    const values = results(run(), state.stage);
    const order = ranked(values);
    const others = run().comparable.map((index) => story.runs[index]).filter((other) => results(other, state.stage));
    const scoreIn = (other, index) => results(other, state.stage)[other.clients.indexOf(run().clients[index])] ?? null;
    const { chart, step, place } = columns(figure, order, {
      label: `${titles()[headline]} of every client, sorted`,
      legend: several ? [run(), ...others].map((other) => ({ label: runName(other), color: color(other.family), shape: "dot" })) : [],
    });
    const all = order.flatMap((index) => [values[index], ...others.map((other) => scoreIn(other, index))]).filter((value) => value !== null);
    const pad = isPercent(headline) ? 0.04 : (Math.max(...all) - Math.min(...all) || Math.abs(all[0]) || 1) * 0.1;
    const low = Math.max(0, Math.min(...all) - pad);
    const high = isPercent(headline) ? Math.min(1, Math.max(...all) + 0.03) : Math.max(...all) + pad;
    const y = linear([low, high], [chart.height, 0]);
    axisLeft(chart, y, ticks(low, high, 5), (value) => bare(value), `${titles()[headline]}${isPercent(headline) ? ", %" : higher() ? "" : ", lower is better"}`);
    const wide = Math.min(6, Math.max(2, step * 0.35));
    order.forEach((index, rank) => {
      const at = place(rank);
      if (step > 6) chart.plot.append(node("line", { class: `rule${dim(index)}`, x1: at, x2: at, y1: y(values[index]), y2: chart.height }));
      for (const other of others) {
        const value = scoreIn(other, index);
        if (value !== null) chart.plot.append(node("circle", { class: `dot${dim(index)}`, cx: at, cy: y(value), r: wide * 0.55, fill: color(other.family) }));
      }
      chart.plot.append(node("circle", { class: `dot own${step > 6 ? " halo" : ""}${dim(index)}`, cx: at, cy: y(values[index]), r: wide, fill: color(several ? run().family : 0) }));
      if (rank < 3 && order.length > 3) chart.plot.append(node("circle", { cx: at, cy: y(values[index]), r: wide + 2.5, fill: "none", stroke: "var(--warn)", "stroke-width": 1.5 }));
    });
    hover(chart, (px) => {
      const rank = Math.min(order.length - 1, Math.max(0, Math.floor(px / step)));
      const index = order[rank];
      if (index === undefined) return null;
      const rows = others.map((other) => `${runName(other)}: ${written(scoreIn(other, index))}`);
      const samples = state.split === "test" && run().samples[index] ? ` of ${run().samples[index]} samples` : "";
      return { tip: [`${clientName(index)}, ${rank + 1} of ${order.length}`, `${runName(run())}: ${written(values[index])}${samples}`, ...rows].join("\n"), client: run().clients[index], outline: [node("circle", { cx: place(rank), cy: y(values[index]), r: wide + 3 })] };
    });
    figure.append(clientTable(values, order, others, scoreIn));
  },
});

function clientTable(values, order, others, scoreIn) {
  const head = ["client", runName(run()), ...others.map(runName), "architecture"];
  const held = run().lineage;
  const rows = order.map((index) => {
    const cells = [written(values[index]), ...others.map((other) => written(scoreIn(other, index))), held.names[held.held.at(-1)[index]] ?? ""];
    return element("tr", { class: state.client === run().clients[index] ? "on" : null }, element("td", {}, run().clients[index]), ...cells.map((cell, i) => element("td", { class: i < cells.length - 1 ? "number" : null }, cell)));
  });
  const header = element("tr", {}, ...head.map((text, i) => element("th", { class: i > 0 && i < head.length - 1 ? "number" : null }, text)));
  return element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroll" }, element("table", {}, header, ...rows)));
}

views.push({
  id: "gain",
  title: "Gain over local training",
  about: () => {
    const gained = gains();
    const order = sorted(gained).slice(0, 3).filter((index) => gained[index] < 0);
    return `${higher() ? `${capital(titles()[headline])} in ${runName(run())} minus that of Local on the same samples` : `${titles()[headline]} of Local minus that in ${runName(run())} on the same samples: higher is better`}${isPercent(headline) ? ", in points" : ""}, sorted. ${order.length ? `Largest losses: ${order.map((index) => `${run().clients[index]} (${points(gained[index])})`).join(", ")}.` : "No client lost."}`;
  },
  controls: () => [picker("split", story.curves.splits, "Samples"), picker("stage", stages(), "Models")],
  missing: () => (run().local !== null && results(run(), state.stage) ? null : `${runName(run())} ${story.families[run().family].method === "local" ? "is local training itself; select another run above" : "has no run of Local on the same samples to compare with: run method.name=local with the same seed and pass both directories to `fedme report`"}.`),
  draw: (figure) => {
    const gained = gains();
    const order = sorted(gained);
    const { chart, step, place } = columns(figure, order, { label: "gain of every client over local training, sorted" });
    const values = order.map((index) => gained[index]);
    const small = isPercent(headline) ? 0.01 : Math.max(...values.map(Math.abs)) * 0.1 || 1e-3;
    const [low, high] = [Math.min(-small, ...values) * 1.1, Math.max(small, ...values) * 1.1];
    const y = linear([low, high], [chart.height, 0]);
    axisLeft(chart, y, ticks(low, high, 5), (value) => bare(value), `${isPercent(headline) ? "points of " : "gain in "}${titles()[headline]}`);
    const wide = Math.max(1.5, step * 0.66);
    order.forEach((index, rank) => {
      const value = gained[index];
      chart.plot.append(node("rect", { class: `bar${dim(index)}`, x: place(rank) - wide / 2, width: wide, y: Math.min(y(value), y(0)), height: Math.max(1.5, Math.abs(y(value) - y(0))), rx: 1, fill: value < 0 ? color(1) : color(0) }));
    });
    chart.plot.append(node("line", { class: "axis", x1: 0, x2: chart.width, y1: y(0), y2: y(0) }));
    hover(chart, (px) => {
      const rank = Math.min(order.length - 1, Math.max(0, Math.floor(px / step)));
      const index = order[rank];
      if (index === undefined) return null;
      const now = results(run(), state.stage)[index];
      return { tip: `${clientName(index)}: ${points(gained[index])}${isPercent(headline) ? " points" : ""}\nlocal ${written(higher() ? now - gained[index] : now + gained[index])}, here ${written(now)}`, client: run().clients[index], outline: [node("rect", { x: place(rank) - step / 2, width: step, y: 0, height: chart.height })] };
    });
  },
});

const points = (value) => `${value > 0 ? "+" : ""}${isPercent(headline) ? (100 * value).toFixed(1) : plain(value)}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);

function gains() {
  const baseline = story.runs[run().local];
  const before = results(baseline, "round");
  return results(run(), state.stage).map((value, index) => {
    const local = before[baseline.clients.indexOf(run().clients[index])];
    return value === null || local === null || local === undefined ? null : higher() ? value - local : local - value;
  });
}
