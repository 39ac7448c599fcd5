// Clients sorted by how good their models are, and by what they gained over training alone.

const stages = () => ({ round: "after the last round", ...(run().results[`${state.split} finetuned`] ? { finetuned: "after fine-tuning" } : {}) });
const results = (each, stage) => each.results[`${state.split} ${stage}`] ?? each.results[`${state.split} round`];
const sorted = (values) => values.map((_, index) => index).filter((index) => values[index] !== null && values[index] !== undefined).sort((a, b) => values[a] - values[b]);
const ranked = (values) => (higher() ? sorted(values) : sorted(values).reverse()); // the worst first
const dim = (index) => (state.client !== null && run().clients[index] !== state.client ? " dim" : "");

function columns(figure, order, options) {
  const names = order.map((index) => run().clients[index]);
  const guess = (Math.max(280, figure.clientWidth) - 60) / Math.max(1, order.length);
  const chart = frame(figure, { height: 230, bottom: roomForNames(names, guess), ...options });
  const step = chart.width / Math.max(1, order.length);
  const place = (rank) => (rank + 0.5) * step;
  namesBelow(chart, names, place, step);
  return { chart, step, place };
}

views.push({
  id: "clients",
  title: "Every client",
  about: () => {
    const values = results(run(), state.stage) ?? [];
    const worst = ranked(values).slice(0, 3).map((index) => `${run().clients[index]} (${written(values[index])})`);
    return `${capital(titles()[headline])} of each client's personal model in ${runName(run())}, sorted. The worst: ${worst.join(", ")}. ${run().comparable.length ? "Small dots are the other runs over the same clients." : ""}`;
  },
  controls: () => [picker("split", story.curves.splits, "Samples"), picker("stage", stages(), "Models")],
  missing: () => (results(run(), state.stage) ? null : "This run has no results per client on these samples."),
  draw: (figure) => {
    const values = results(run(), state.stage);
    const order = ranked(values);
    const others = run().comparable.map((index) => story.runs[index]).filter((each) => results(each, state.stage));
    const other = (each, index) => results(each, state.stage)[each.clients.indexOf(run().clients[index])] ?? null;
    const everything = [run(), ...others];
    const { chart, step, place } = columns(figure, order, {
      label: `${titles()[headline]} of every client, sorted`,
      legend: several ? everything.map((each) => ({ label: runName(each), color: color(each.family), shape: "dot" })) : [],
    });
    const all = order.flatMap((index) => [values[index], ...others.map((each) => other(each, index))]).filter((value) => value !== null);
    const pad = share(headline) ? 0.04 : (Math.max(...all) - Math.min(...all) || Math.abs(all[0]) || 1) * 0.1;
    const low = Math.max(0, Math.min(...all) - pad);
    const high = share(headline) ? Math.min(1, Math.max(...all) + 0.03) : Math.max(...all) + pad;
    const y = linear([low, high], [chart.height, 0]);
    axisLeft(chart, y, ticks(low, high, 5), (value) => bare(value), `${titles()[headline]}${share(headline) ? ", %" : higher() ? "" : ", less is better"}`);
    const wide = Math.min(6, Math.max(2, step * 0.35));
    order.forEach((index, rank) => {
      const at = place(rank);
      if (step > 6) chart.plot.append(node("line", { class: `rule${dim(index)}`, x1: at, x2: at, y1: y(values[index]), y2: chart.height }));
      for (const each of others) {
        const value = other(each, index);
        if (value !== null) chart.plot.append(node("circle", { class: `dot${dim(index)}`, cx: at, cy: y(value), r: wide * 0.55, fill: color(each.family) }));
      }
      chart.plot.append(node("circle", { class: `dot own${step > 6 ? " halo" : ""}${dim(index)}`, cx: at, cy: y(values[index]), r: wide, fill: color(several ? run().family : 0) }));
      if (rank < 3 && order.length > 3) chart.plot.append(node("circle", { cx: at, cy: y(values[index]), r: wide + 2.5, fill: "none", stroke: "var(--warn)", "stroke-width": 1.5 }));
    });
    hover(chart, (px) => {
      const rank = Math.min(order.length - 1, Math.max(0, Math.floor(px / step)));
      const index = order[rank];
      if (index === undefined) return null;
      const rows = others.map((each) => `${runName(each)}: ${written(other(each, index))}`);
      const samples = state.split === "test" && run().samples[index] ? ` of ${run().samples[index]} samples` : "";
      return { tip: [`${clientName(index)}, ${rank + 1} of ${order.length}`, `${runName(run())}: ${written(values[index])}${samples}`, ...rows].join("\n"), client: run().clients[index], outline: [node("circle", { cx: place(rank), cy: y(values[index]), r: wide + 3 })] };
    });
    figure.append(clientTable(values, order, others, other));
  },
});

function clientTable(values, order, others, other) {
  const head = ["client", runName(run()), ...others.map(runName), "architecture"];
  const held = run().lineage;
  const rows = order.map((index) => {
    const cells = [written(values[index]), ...others.map((each) => written(other(each, index))), held.names[held.held.at(-1)[index]] ?? ""];
    return element("tr", { class: state.client === run().clients[index] ? "on" : null }, element("td", {}, run().clients[index]), ...cells.map((cell, i) => element("td", { class: i < cells.length - 1 ? "number" : null }, cell)));
  });
  const header = element("tr", {}, ...head.map((text, i) => element("th", { class: i > 0 && i < head.length - 1 ? "number" : null }, text)));
  return element("details", {}, element("summary", {}, "As a table"), element("div", { class: "scroll" }, element("table", {}, header, ...rows)));
}

views.push({
  id: "gain",
  title: "Gain over training alone",
  about: () => {
    const gained = gains();
    const order = sorted(gained).slice(0, 3).filter((index) => gained[index] < 0);
    return `${higher() ? `${capital(titles()[headline])} in ${runName(run())} minus that of Local with the same samples` : `${titles()[headline]} of Local minus that in ${runName(run())} with the same samples, so that more is better`}${share(headline) ? ", in points" : ""}, sorted. ${order.length ? `Most lost: ${order.map((index) => `${run().clients[index]} (${points(gained[index])})`).join(", ")}.` : "Nobody lost."}`;
  },
  controls: () => [picker("split", story.curves.splits, "Samples"), picker("stage", stages(), "Models")],
  missing: () => (run().local !== null && results(run(), state.stage) ? null : `${runName(run())} ${story.families[run().family].method === "local" ? "is training alone itself; choose another run above" : "has no run of Local over the same samples beside it: make one (method.name=local, same seed) and give both to the report"}.`),
  draw: (figure) => {
    const gained = gains();
    const order = sorted(gained);
    const { chart, step, place } = columns(figure, order, { label: "gain of every client over training alone, sorted" });
    const values = order.map((index) => gained[index]);
    const small = share(headline) ? 0.01 : Math.max(...values.map(Math.abs)) * 0.1 || 1e-3;
    const [low, high] = [Math.min(-small, ...values) * 1.1, Math.max(small, ...values) * 1.1];
    const y = linear([low, high], [chart.height, 0]);
    axisLeft(chart, y, ticks(low, high, 5), (value) => bare(value), `${share(headline) ? "points of " : "gain in "}${titles()[headline]}`);
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
      return { tip: `${clientName(index)}: ${points(gained[index])}${share(headline) ? " points" : ""}\nalone ${written(higher() ? now - gained[index] : now + gained[index])}, now ${written(now)}`, client: run().clients[index], outline: [node("rect", { x: place(rank) - step / 2, width: step, y: 0, height: chart.height })] };
    });
  },
});

const points = (value) => `${value > 0 ? "+" : ""}${share(headline) ? (100 * value).toFixed(1) : plain(value)}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);

function gains() {
  const alone = story.runs[run().local];
  const before = results(alone, "round");
  return results(run(), state.stage).map((value, index) => {
    const then = before[alone.clients.indexOf(run().clients[index])];
    return value === null || then === null || then === undefined ? null : higher() ? value - then : then - value;
  });
}
