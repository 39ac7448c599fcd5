// The first screen: notes that bear on the results, tiles, what to look at next, and the runs side by side.

function drawNotes() {
  if (!story.notes.length) return [];
  const list = (lines) => element("ul", {}, ...lines.map((line) => element("li", {}, ...prose(line))));
  const [first, rest] = [story.notes.slice(0, 4), story.notes.slice(4)];
  return [element("section", { id: "notes", "aria-label": "notes" }, element("h2", {}, "Before you read the results"), list(first), ...(rest.length ? [element("details", {}, element("summary", {}, `${many(rest.length, "more note")}`), list(rest))] : []))];
}

// Counts of clients as a bar, with the marks and colours of the chart.
function sideBar(parts) {
  const total = parts.reduce((sum, [, count]) => sum + count, 0) || 1;
  const bar = node("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", class: "sides", "aria-hidden": "true" });
  let x = 0;
  for (const [name, count] of parts) {
    const width = (100 * count) / total;
    if (count) bar.append(node("rect", { x, y: 0, width: Math.max(0.5, width - 0.6), height: 6, fill: SIDES[name][0] }));
    x += width;
  }
  const words = parts.map(([name, count]) => {
    const icon = node("svg", { viewBox: "-7 -7 14 14", width: 12, height: 12, "aria-hidden": "true" }, mark(SIDES[name][1], 0, 0, 5, { color: SIDES[name][0] }));
    return element("span", { class: "side" }, icon, element("b", {}, count.toLocaleString("en")), ` ${name}`);
  });
  return [bar, element("p", { class: "counts" }, ...words)];
}

function drawTiles() {
  const tiles = family().tiles.map(({ title, value, details, link, parts, client }) => {
    const go = () => {
      if (client !== undefined) state.client = client;
      visit(link);
    };
    return element("li", { class: "tile" }, element("h3", {}, element("a", { href: `#${link}`, click: (event) => {
      event.preventDefault();
      go();
    } }, title)), element("p", { class: "value" }, value), ...(parts ? sideBar(parts) : []), ...details.map((line) => element("p", { class: "detail" }, ...prose(line))));
  });
  document.getElementById("tiles").replaceChildren(...tiles);
  const steps = family().next.map(({ text, link, client, command }) => {
    if (command) return element("li", {}, `${text} `, element("code", {}, command));
    return element("li", {}, element("a", { href: `#${link}`, click: (event) => {
      event.preventDefault();
      if (client !== undefined) state.client = client;
      visit(link);
    } }, text));
  });
  document.getElementById("next").replaceChildren(...steps);
  document.getElementById("whose").textContent = several ? `${family().label}${family().label.toLowerCase().includes(family().method.toLowerCase()) ? "" : ` (${family().method})`}` : "";
}

function summaryTable() {
  const { header, better, rows } = story.summary.table;
  return { columns: header.map((title, i) => ({ title, number: better[i] !== null, better: better[i] })), rows: rows.map((cells) => ({ cells })) };
}

function drawSummary(section) {
  const list = (lines) => element("ul", {}, ...lines.map((line) => element("li", {}, ...prose(line))));
  const { columns, rows } = summaryTable();
  section.append(dataTable("summary", "all runs side by side", columns, rows));
  section.append(element("p", { class: "caption" }, `${rows.length > 1 ? "The best value of a column is bold. Click a heading to sort. " : ""}${columns.some(({ title }) => title === "gained") ? "Gained, lost and not clear count clients, compared with training alone, beyond chance (corrected for their number)." : ""}`));
  section.append(csvButton("summary", () => tableCsv(columns, rows)));
  for (const { about, lines } of story.summary.paragraphs) section.append(element("details", { open: about === "In short" }, element("summary", {}, about), list(lines)));
}
