// The exchange of models: over all rounds, and round by round.

const noExchange = () => (run().exchange ? null : `${runName(run())} has no exchange of models: its method is ${story.families[run().family].method}.`);

function countLoans() {
  const size = shownClients().length;
  const lent = Array.from({ length: size }, () => new Array(size).fill(0));
  const adopted = lent.map((row) => row.slice());
  run().exchange.lenders.forEach((row, t) =>
    row.forEach((lender, borrower) => {
      if (lender < 0 || lender >= size || borrower >= size) return;
      lent[borrower][lender] += 1;
      adopted[borrower][lender] += run().exchange.adopted[t][borrower];
    }),
  );
  return { lent, adopted };
}

views.push({
  id: "exchange",
  title: "Loans between clients",
  about: () => `All rounds together. Columns lend, rows borrow; the darker a square, the more loans. The dot grows with the fraction of loans that the borrower adopted.${truncationNote()}`,
  missing: noExchange,
  draw: (figure) => {
    const names = run().clients.slice(0, MAX_CLIENTS);
    const { lent, adopted } = countLoans();
    const left = 16 + labelWidth(names);
    const width = Math.max(280, figure.clientWidth);
    const cell = Math.min(28, (width - left - 14) / names.length);
    const side = cell * names.length;
    const chart = frame(figure, { height: side, left, right: width - left - side, top: 24, bottom: heightOfNames(names, cell) + 4, label: "number of loans between every two clients" });
    namesBelow(chart, names, (index) => (index + 0.5) * cell, cell);
    chart.plot.append(node("text", { class: "soft", x: -left, y: -10 }, "borrower ↓   lender →"));
    const most = Math.max(1, ...lent.flat());
    names.forEach((name, row) => {
      if (cell >= 9) chart.plot.append(node("text", { class: state.client === name ? "warn small" : "soft small", x: -6, y: (row + 0.5) * cell + 3.5, "text-anchor": "end" }, shorten(name)));
      names.forEach((_, column) => {
        const count = lent[row][column];
        const chosen = state.client === null || name === state.client || names[column] === state.client;
        const gap = cell > 6 ? 1 : 0;
        const place = { x: column * cell, y: row * cell, width: cell - gap, height: cell - gap };
        if (row === column || count || cell > 6) chart.plot.append(node("rect", { class: `${count ? "loan" : "none"}${chosen ? "" : " dim"}`, ...place, fill: count ? color(0) : null, "fill-opacity": count ? 0.15 + 0.6 * (count / most) : row === column ? 1 : 0.45 }));
        if (adopted[row][column]) chart.plot.append(node("circle", { class: chosen ? null : "dim", cx: (column + 0.5) * cell - gap / 2, cy: (row + 0.5) * cell - gap / 2, r: Math.max(0.8, 0.42 * cell * Math.sqrt(adopted[row][column] / count)), fill: color(1) }));
      });
    });
    hover(chart, (px, py) => {
      const [column, row] = [Math.floor(px / cell), Math.floor(py / cell)];
      if (!(column >= 0 && row >= 0 && column < names.length && row < names.length)) return null;
      const tip = row === column ? `client ${names[row]} does not borrow from itself` : `${names[column]} lent to ${names[row]} ${lent[row][column]} times\n${adopted[row][column]} of them adopted`;
      return { tip, client: names[row], outline: [node("rect", { x: column * cell, y: row * cell, width: cell, height: cell })] };
    });
  },
});

let playing = null;
function stopPlaying() {
  clearInterval(playing);
  playing = null;
}

const shownRound = () => Math.min(state.round ?? run().rounds - 1, run().rounds - 1);

function roundControls() {
  const slide = (t) => {
    state.round = t;
    redraw("loans");
  };
  const label = element("span", {}, `round ${shownRound()}`);
  const range = element("input", { type: "range", min: 0, max: run().rounds - 1, value: shownRound(), "aria-label": "round", input: (event) => slide(Number(event.target.value)) });
  const play = element("button", { type: "button", click: () => {
    if (playing !== null) stopPlaying();
    else playing = setInterval(() => {
      if (shownRound() + 1 >= run().rounds) stopPlaying();
      slide(Math.min(shownRound() + 1, run().rounds - 1));
    }, 700);
    if (playing !== null && shownRound() + 1 >= run().rounds) state.round = 0;
    redraw("loans");
  } }, playing === null ? "play" : "stop");
  return [play, element("label", {}, range, label)];
}

views.push({
  id: "loans",
  title: "Loans of one round",
  about: () => `An arc goes from a lender to a borrower: above to the right, below to the left. Thick arcs mark adopted models. The colour of a client is its architecture; clients are sorted by cluster.${truncationNote()}`,
  controls: roundControls,
  missing: noExchange,
  draw: (figure) => {
    const t = shownRound();
    const { lenders, adopted } = run().exchange;
    const { names: archs, held } = run().lineage;
    const clusters = run().clusters?.of[t];
    const names = run().clients;
    const order = shownClients();
    if (clusters) order.sort((a, b) => clusters[a] - clusters[b] || a - b);
    const before = held[t];
    const present = [...new Set(before)].filter((arch) => arch >= 0).sort((a, b) => a - b);
    const chart = frame(figure, {
      height: Math.min(300, Math.max(200, figure.clientWidth * 0.36)),
      left: 12,
      right: 12,
      top: 6,
      bottom: 6,
      label: `loans of round ${t}`,
      legend: [...present.map((arch) => ({ label: archs[arch], color: color(arch), shape: "dot" })), { label: "adopted", color: "var(--ink)", shape: "line" }, { label: "not adopted", color: "var(--soft)", dash: "3 3", shape: "line" }],
    });
    const step = chart.width / order.length;
    const middle = chart.height / 2;
    const radius = Math.max(2, Math.min(10, step * 0.42));
    const at = new Map(order.map((index, rank) => [index, (rank + 0.5) * step]));
    const tall = middle - 12;
    const longest = Math.max(1, ...order.map((index) => (at.has(lenders[t][index]) ? Math.abs(at.get(index) - at.get(lenders[t][index])) : 0)));
    for (const borrower of order) {
      const lender = lenders[t][borrower];
      if (!at.has(lender)) continue;
      const [from, to] = [at.get(lender), at.get(borrower)];
      const right = to > from;
      const top = middle + (right ? -1 : 1) * (radius + 4 + (tall - radius - 4) * (Math.abs(to - from) / longest));
      const edge = middle + (right ? -radius : radius);
      const chosen = state.client === null || names[borrower] === state.client || names[lender] === state.client;
      const taken = adopted[t][borrower];
      const bent = `M${from} ${edge}C${from} ${top} ${to} ${top} ${to} ${edge}`;
      chart.plot.append(node("path", { class: `loan${chosen ? "" : " dim"}`, d: bent, fill: "none", stroke: taken ? color(Math.max(0, before[lender])) : "var(--soft)", "stroke-width": taken ? 2.5 : 1, "stroke-dasharray": taken ? null : "3 3" }));
      const tipward = right ? -1 : 1;
      chart.plot.append(node("path", { class: chosen ? null : "dim", d: `M${to - 3.5} ${edge + 5 * tipward}L${to} ${edge}L${to + 3.5} ${edge + 5 * tipward}`, fill: "none", stroke: taken ? color(Math.max(0, before[lender])) : "var(--soft)", "stroke-width": 1.5 }));
    }
    for (const index of order) {
      const x = at.get(index);
      const absent = lenders[t][index] < 0 && !run().exchange.lenders[t].includes(index);
      chart.plot.append(node("circle", { class: `halo${dim(index)}`, cx: x, cy: middle, r: radius, fill: before[index] < 0 || absent ? "var(--none)" : color(before[index]) }));
      if (radius >= 7.5 && names[index].length <= 3) chart.plot.append(node("text", { class: `small${dim(index)}`, x, y: middle + 3.5, "text-anchor": "middle", style: absent ? null : "fill: var(--card); font-weight: 600" }, names[index]));
      else if (step >= textWidth(names[index], 10) + 8) chart.plot.append(node("text", { class: `small soft${dim(index)}`, x, y: middle + radius + 12, "text-anchor": "middle", style: "paint-order: stroke; stroke: var(--card); stroke-width: 3px" }, names[index]));
    }
    hover(chart, (px) => {
      const index = order[Math.min(order.length - 1, Math.max(0, Math.floor(px / step)))];
      const lender = lenders[t][index];
      const lendsTo = order.filter((other) => lenders[t][other] === index).map((other) => names[other]);
      const rows = [
        `${clientName(index)}, round ${t}: ${archs[before[index]] ?? "architecture unknown"}${clusters && clusters[index] >= 0 ? `, cluster ${clusters[index]}` : ""}`,
        lender < 0 ? "borrowed nothing" : `borrowed ${archs[before[lender]] ?? "the model"} from ${names[lender]} and ${adopted[t][index] ? "adopted it" : "kept its own"}`,
        lendsTo.length ? `lent to ${lendsTo.join(", ")}` : "lent to no client",
      ];
      return { tip: rows.join("\n"), client: names[index], outline: [node("circle", { cx: at.get(index), cy: middle, r: radius + 3 })] };
    });
  },
});
