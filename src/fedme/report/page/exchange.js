// The exchange of models over all rounds: between clients or, if there are many, between their groups.

const noExchange = () => (run().exchange ? null : `${runName(run())} has no exchange of models: its method is ${family().method}.`);

// Loans and adoptions by lender, for every borrower.
function countLoans() {
  const loans = run().clients.map(() => new Map());
  run().exchange.lenders.forEach((row, t) =>
    row.forEach((lender, borrower) => {
      if (lender < 0) return;
      const [lent, adopted] = loans[borrower].get(lender) ?? [0, 0];
      loans[borrower].set(lender, [lent + 1, adopted + run().exchange.adopted[t][borrower]]);
    }),
  );
  return loans;
}

// Groups of clients: their last clusters or, without clusters, their last architectures.
function groupsOfClients() {
  const clusters = run().clusters?.of;
  const { names, held } = run().lineage;
  const last = (index) => clusters.findLast((row) => row[index] >= 0)?.[index] ?? -1;
  const labelOf = clusters ? (index) => (last(index) < 0 ? "no cluster" : `cluster ${last(index)}`) : (index) => names[held.at(-1)[index]] ?? "unknown";
  const labels = run().clients.map((_, index) => labelOf(index));
  const groups = [...new Set(labels)].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  return { groups, of: labels.map((label) => groups.indexOf(label)), what: clusters ? "cluster in its last round" : "last architecture" };
}

const fewClients = () => run().clients.length <= FEW;

views.push({
  id: "exchange",
  title: "Loans between clients",
  about: () => {
    const { groups, what } = groupsOfClients();
    const matrix = "All rounds together. Columns lend, rows borrow; the stronger the colour of a square, the more loans.";
    if (fewClients()) return `${matrix} The dot grows with the fraction of loans that the borrower adopted.`;
    if (groups.length > 1) return `${matrix} With so many clients, they are grouped by their ${what}. Below are the busiest lenders.`;
    return "All rounds together. With so many clients, only the busiest lenders are shown.";
  },
  missing: noExchange,
  draw: (figure) => (fewClients() ? drawMatrix(figure, run().clients, countLoans()) : drawGroups(figure)),
  csv: () => [["lender", "borrower", "loans", "adopted"], ...countLoans().flatMap((of, borrower) => [...of].sort(([a], [b]) => a - b).map(([lender, [lent, adopted]]) => [run().clients[lender], run().clients[borrower], lent, adopted]))],
});

// `loans[row]` maps a column to [lent, adopted].
function matrixCells(chart, names, loans, cell, chosen, numbers) {
  const most = loans.reduce((most, row) => largest([...row.values()].map(([lent]) => lent), most), 1);
  loans.forEach((row, i) =>
    names.forEach((_, j) => {
      const [lent, adopted] = row.get(j) ?? [0, 0];
      const faint = chosen(i, j) ? "" : " dim";
      chart.plot.append(node("rect", { class: `${lent ? "loan" : "none"}${faint}`, x: j * cell, y: i * cell, width: cell - 1, height: cell - 1, fill: lent ? "var(--shade)" : null, "fill-opacity": lent ? 0.12 + 0.5 * (lent / most) : 0.45 }));
      if (numbers && lent) chart.plot.append(node("text", { class: "small", x: (j + 0.5) * cell, y: (i + 0.5) * cell - 4, "text-anchor": "middle" }, `${lent}`), node("text", { class: "small", x: (j + 0.5) * cell, y: (i + 0.5) * cell + 10, "text-anchor": "middle" }, `${Math.round((100 * adopted) / lent)} %`));
      else if (adopted) chart.plot.append(node("circle", { class: `adopted${faint}`, cx: (j + 0.5) * cell - 0.5, cy: (i + 0.5) * cell - 0.5, r: Math.max(1, 0.4 * cell * Math.sqrt(adopted / lent)), fill: "var(--ink)" }));
    }),
  );
}

function drawMatrix(figure, names, loans) {
  const left = 16 + labelWidth(names);
  const width = Math.max(280, figure.clientWidth);
  const cell = Math.min(names.length > 8 ? 28 : 48, (width - left - 14) / names.length);
  const side = cell * names.length;
  const chart = frame(figure, { height: side, left, right: width - left - side, top: 24, bottom: heightOfNames(names, cell) + 4, label: "number of loans between every two clients" });
  namesBelow(chart, names, (index) => (index + 0.5) * cell, cell);
  chart.plot.append(node("text", { class: "soft", x: -left, y: -10 }, "borrower ↓   lender →"));
  const nth = everyNth(cell + 2);
  names.forEach((name, row) => {
    if (row % nth === 0 || name === state.client) chart.plot.append(node("text", { class: state.client === name ? "chosen small" : "soft small", x: -6, y: (row + 0.5) * cell + 4, "text-anchor": "end" }, shorten(name)));
  });
  matrixCells(chart, names, loans, cell, (row, column) => state.client === null || names[row] === state.client || names[column] === state.client, false);
  hover(chart, (px, py) => {
    const [column, row] = [Math.floor(px / cell), Math.floor(py / cell)];
    if (!(column >= 0 && row >= 0 && column < names.length && row < names.length)) return null;
    const [lent, adopted] = loans[row].get(column) ?? [0, 0];
    const tip = row === column ? `client ${names[row]} does not borrow from itself` : `${names[column]} lent to ${names[row]} ${lent === 1 ? "once" : `${lent} times`}\n${adopted} of them adopted`;
    return { tip, client: names[row], outline: [node("rect", { x: column * cell, y: row * cell, width: cell, height: cell })] };
  }, { x: cell, y: cell });
}

// Above: loans between groups, in numbers and with the share of adopted ones. Below: the clients that lent most, or the partners of
// the selected client.
function drawGroups(figure) {
  const { groups, of } = groupsOfClients();
  const loans = countLoans();
  const between = groups.map(() => new Map());
  const lentBy = run().clients.map(() => [0, 0]);
  loans.forEach((row, borrower) =>
    row.forEach(([lent, adopted], lender) => {
      const [a, b] = between[of[borrower]].get(of[lender]) ?? [0, 0];
      between[of[borrower]].set(of[lender], [a + lent, b + adopted]);
      lentBy[lender] = [lentBy[lender][0] + lent, lentBy[lender][1] + adopted];
    }),
  );
  const chosen = clientIndex();
  const partners = chosen < 0 ? lentBy.map(([lent, adopted], index) => ({ index, lent, adopted })) : [...loans[chosen]].map(([index, [lent, adopted]]) => ({ index, lent, adopted }));
  const busiest = partners.filter(({ lent }) => lent).sort((a, b) => b.lent - a.lent || a.index - b.index).slice(0, TEN);
  const names = busiest.map(({ index }) => run().clients[index]);
  const left = 18 + Math.max(labelWidth(groups), labelWidth(names));
  const width = Math.max(280, figure.clientWidth);
  const cell = Math.min(64, (width - left - 14) / groups.length);
  const side = groups.length > 1 ? cell * groups.length : 0; // between one group and itself there is nothing to see
  const numbers = cell >= 34;
  const start = side ? side + heightOfNames(groups, cell) + 34 : 8;
  const tall = 18;
  const chart = frame(figure, { height: start + tall * busiest.length, left, right: 60, top: 24, bottom: 12, label: `number of loans between ${groups.length} groups of clients, and the busiest lenders` });
  if (side) {
    chart.plot.append(node("text", { class: "soft", x: -left, y: -10 }, `borrower ↓   lender →${numbers ? "   (loans, and the share adopted)" : ""}`));
    groups.forEach((name, row) => {
      if (row % everyNth(cell) === 0) chart.plot.append(node("text", { class: "soft small", x: -6, y: (row + 0.5) * cell + 4, "text-anchor": "end" }, shorten(name)));
    });
    namesBelow(chart, groups, (index) => (index + 0.5) * cell, cell, side);
    matrixCells(chart, groups, between, cell, () => true, numbers);
  }
  chart.plot.append(node("text", { class: "soft", x: -left, y: start - 12 }, chosen < 0 ? "the busiest lenders: loans, and how many were adopted" : `the lenders of ${clientName(chosen)}`));
  const x = linear([0, largest(busiest.map(({ lent }) => lent), 1)], [0, chart.width]);
  busiest.forEach(({ index, lent, adopted }, i) => {
    const y = start + i * tall;
    chart.plot.append(node("text", { class: "soft small", x: -6, y: y + 12, "text-anchor": "end" }, shorten(run().clients[index])));
    chart.plot.append(node("rect", { class: "bar", x: 0, y: y + 2, width: x(lent), height: tall - 5, fill: "var(--shade)", "fill-opacity": 0.35 }));
    if (adopted) chart.plot.append(node("rect", { class: "bar", x: 0, y: y + 6, width: x(adopted), height: tall - 13, fill: "var(--ink)" }));
    chart.plot.append(node("text", { class: "soft small", x: x(lent) + 6, y: y + 12 }, `${lent}, ${adopted}`));
  });
  hover(chart, (px, py) => {
    const [column, row, i] = [Math.floor(px / cell), Math.floor(py / cell), Math.floor((py - start) / tall)];
    if (py < side && row >= 0 && row < groups.length && column >= 0 && column < groups.length) {
      const [lent, adopted] = between[row].get(column) ?? [0, 0];
      return { tip: `${groups[column]} lent to ${groups[row]} ${lent} times\n${adopted} of them adopted`, outline: [node("rect", { x: column * cell, y: row * cell, width: cell, height: cell })] };
    }
    if (!(i >= 0 && i < busiest.length)) return null;
    const { index, lent, adopted } = busiest[i];
    return { tip: `${clientName(index)} lent ${lent} times${chosen < 0 ? "" : ` to ${run().clients[chosen]}`}\n${adopted} of them adopted`, client: run().clients[index], outline: [node("rect", { x: 0, y: start + i * tall, width: chart.width, height: tall })] };
  }, { x: cell, y: tall });
}
