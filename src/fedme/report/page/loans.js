// The exchange of one round: arcs from lenders to borrowers. Of many clients, those of one client.

let playing = null;
function stopPlaying() {
  clearInterval(playing);
  playing = null;
}

const shownRound = () => Math.min(state.round ?? run().rounds - 1, run().rounds - 1);

function roundControls() {
  const slide = (t) => {
    state.round = t;
    writeAddress();
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

// Of many clients, the one whose arcs are drawn: the selected one, else the busiest lender of the round.
function focusClient(t) {
  if (fewClients()) return null;
  if (clientIndex() >= 0) return clientIndex();
  const counts = new Map();
  for (const lender of run().exchange.lenders[t]) if (lender >= 0) counts.set(lender, (counts.get(lender) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0])[0]?.[0] ?? null;
}

views.push({
  id: "loans",
  title: "Loans of one round",
  about: () => {
    const focus = focusClient(shownRound());
    const whose = focus === null ? "" : ` With so many clients, only the loans of ${clientName(focus)} are drawn${state.client === null ? ", the busiest lender of the round; select another one above" : ""}.`;
    return `An arc goes from a lender to a borrower: above to the right, below to the left. Thick arcs mark adopted models. The colour of a client is its architecture; clients are sorted by ${run().clusters ? "cluster" : "name"}.${whose}`;
  },
  controls: roundControls,
  missing: noExchange,
  draw: (figure) => drawLoans(figure, shownRound()),
  csv: () => {
    const { lenders, adopted } = run().exchange;
    const { names, held } = run().lineage;
    const rows = lenders.flatMap((row, t) => row.map((lender, borrower) => (lender < 0 ? null : [t, run().clients[lender], run().clients[borrower], names[held[t][lender]] ?? "", adopted[t][borrower], run().clusters?.of[t][borrower]])).filter(Boolean));
    return [["round", "lender", "borrower", "architecture of the loan", "adopted", "cluster of the borrower"], ...rows];
  },
});

const DARK = [0, 3, 6, 8]; // architectures whose colour is dark

function drawLoans(figure, t) {
  const { lenders, adopted } = run().exchange;
  const { names: archs, held } = run().lineage;
  const clusters = run().clusters?.of[t];
  const names = run().clients;
  const order = names.map((_, index) => index);
  if (clusters) order.sort((a, b) => clusters[a] - clusters[b] || a - b);
  const focus = focusClient(t);
  const before = held[t];
  const present = [...new Set(before)].filter((arch) => arch >= 0).sort((a, b) => a - b);
  const shown = order.map((index) => names[index]);
  const guess = (Math.max(280, figure.clientWidth) - 24) / order.length;
  const short = order.every((index) => names[index].length <= 3) && guess >= 20; // short names fit into the circles
  const named = !short && focus === null;
  const chart = frame(figure, {
    height: Math.min(300, Math.max(200, figure.clientWidth * 0.36)),
    left: named && turnedNames(shown, guess) ? Math.max(12, labelWidth(shown, 14) / 2) : 12, // turned names reach to the left
    right: 12,
    top: 6,
    bottom: named ? heightOfNames(shown, guess) : 8,
    label: `loans of round ${t}`,
    legend: [...present.map((arch) => ({ label: archs[arch], color: archColor(arch) })), { label: "adopted", color: "var(--ink)", shape: "line" }, { label: "not adopted", color: "var(--soft)", dash: "3 3", shape: "line" }],
  });
  const step = chart.width / order.length;
  const middle = chart.height / 2;
  const radius = Math.max(focus === null ? 2.5 : 0.5, Math.min(10, step * 0.42));
  const at = new Map(order.map((index, rank) => [index, (rank + 0.5) * step]));
  const tall = middle - 12;
  const drawn = order.filter((borrower) => at.has(lenders[t][borrower]) && (focus === null || borrower === focus || lenders[t][borrower] === focus));
  const longest = largest(drawn.map((index) => Math.abs(at.get(index) - at.get(lenders[t][index]))), 1);
  for (const borrower of drawn) {
    const lender = lenders[t][borrower];
    const [from, to] = [at.get(lender), at.get(borrower)];
    const right = to > from;
    const top = middle + (right ? -1 : 1) * (radius + 6 + (tall - radius - 6) * (Math.abs(to - from) / longest));
    const edge = middle + (right ? -1 : 1) * Math.max(radius, 3);
    const chosen = state.client === null || names[borrower] === state.client || names[lender] === state.client;
    const taken = adopted[t][borrower];
    const paint = taken ? archColor(Math.max(0, before[lender])) : "var(--soft)";
    chart.plot.append(node("path", { class: `loan${chosen ? "" : " dim"}`, d: `M${from} ${edge}C${from} ${top} ${to} ${top} ${to} ${edge}`, fill: "none", stroke: paint, "stroke-width": taken ? 2.8 : 1.1, "stroke-dasharray": taken ? null : "3 3" }));
    const tipward = right ? -1 : 1;
    chart.plot.append(node("path", { class: chosen ? null : "dim", d: `M${to - 3.5} ${edge + 5 * tipward}L${to} ${edge}L${to + 3.5} ${edge + 5 * tipward}`, fill: "none", stroke: paint, "stroke-width": 1.6 }));
  }
  const lending = new Set(lenders[t]);
  for (const index of order) {
    const x = at.get(index);
    const absent = lenders[t][index] < 0 && !lending.has(index);
    const fill = before[index] < 0 || absent ? "var(--none)" : archColor(before[index]);
    if (radius < 2.5) chart.plot.append(node("rect", { x: x - step / 2, y: middle - 3, width: step, height: 6, fill }));
    else chart.plot.append(node("circle", { class: `halo${dim(index)}`, cx: x, cy: middle, r: radius, fill }));
    if (short) chart.plot.append(node("text", { class: `small ${DARK.includes(before[index] % 9) && !absent ? "bright" : "inside"}${dim(index)}`, x, y: middle + 4, "text-anchor": "middle" }, names[index]));
  }
  if (focus !== null) {
    // Names of the client in focus and of its partners, as far as they do not cover each other.
    chart.plot.append(mark("circle", at.get(focus), middle, 5, { color: "var(--chosen)", class: "halo" }));
    const taken = [];
    for (const index of [focus, ...drawn.flatMap((borrower) => [borrower, lenders[t][borrower]])]) {
      const x = Math.min(chart.width - textWidth(shorten(names[index]), SMALL) / 2, Math.max(textWidth(shorten(names[index]), SMALL) / 2, at.get(index)));
      const half = textWidth(shorten(names[index]), SMALL) / 2 + 4;
      if (taken.some(([a, b]) => x - half < b && x + half > a)) continue;
      taken.push([x - half, x + half]);
      chart.plot.append(node("text", { class: `small haloed${index === focus ? " chosen" : ""}`, x, y: middle + 20, "text-anchor": "middle" }, shorten(names[index])));
    }
  } else if (named) namesBelow(chart, shown, (rank) => (rank + 0.5) * step, step, chart.height);
  hover(chart, (px) => {
    const index = order[Math.min(order.length - 1, Math.max(0, Math.floor(px / step)))];
    const lender = lenders[t][index];
    const lendsTo = order.filter((other) => lenders[t][other] === index).map((other) => names[other]);
    const listed = lendsTo.length > 8 ? `${lendsTo.slice(0, 8).join(", ")} and ${lendsTo.length - 8} more` : lendsTo.join(", ");
    const rows = [
      `${clientName(index)}, round ${t}: ${archs[before[index]] ?? "architecture unknown"}${clusters && clusters[index] >= 0 ? `, cluster ${clusters[index]}` : ""}`,
      lender < 0 ? "borrowed nothing" : `borrowed ${archs[before[lender]] ?? "the model"} from ${names[lender]} and ${adopted[t][index] ? "adopted it" : "kept its own"}`,
      lendsTo.length ? `lent to ${listed}` : "lent to no client",
    ];
    return { tip: rows.join("\n"), client: names[index], outline: [node("circle", { cx: at.get(index), cy: middle, r: Math.max(radius, 3) + 3 })] };
  }, { x: step, y: 12 });
}
