// Tables that sort by a click on a heading, with a first column that stays, and as CSV.

// `columns` are {title, number?, better?}, `rows` {cells, client?}; a cell is a text or [text, value to sort by].
// `better` is "higher" or "lower": the best value of the column is bold, unless all are equal.
function dataTable(id, label, columns, rows) {
  const text = (cell) => (Array.isArray(cell) ? cell[0] : typeof cell === "number" ? cell.toLocaleString("en", { maximumFractionDigits: 20 }) : `${cell}`);
  const value = (cell) => (Array.isArray(cell) ? cell[1] : cell);
  const wrap = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label });
  const best = columns.map(({ better }, i) => {
    const values = rows.map((row) => value(row.cells[i])).filter((one) => typeof one === "number");
    return better && values.length > 1 && largest(values) > smallest(values) ? (better === "higher" ? largest(values) : smallest(values)) : null;
  });
  const fill = () => {
    const [, column, way] = /^(\d+)([ad])$/.exec(state.sort[id] ?? "") ?? [];
    const by = column === undefined || Number(column) >= columns.length ? null : Number(column);
    const order = [...rows];
    if (by !== null) {
      const sign = way === "d" ? -1 : 1;
      order.sort((a, b) => {
        const [x, y] = [value(a.cells[by]), value(b.cells[by])];
        const [xs, ys] = [typeof x === "number", typeof y === "number"];
        if (xs !== ys) return xs ? -1 : 1; // what is unknown stands at the end
        return xs ? sign * (x - y) : sign * `${x}`.localeCompare(`${y}`, "en", { numeric: true });
      });
    }
    const headings = columns.map(({ title, number }, i) => {
      const sorted = by === i ? (way === "d" ? "descending" : "ascending") : null;
      const press = () => {
        const first = number ? "d" : "a";
        const next = sorted === null ? first : (sorted === "descending") === (first === "d") ? (first === "d" ? "a" : "d") : null;
        if (next === null) delete state.sort[id];
        else state.sort[id] = `${i}${next}`;
        writeAddress();
        fill();
        wrap.querySelectorAll("th button")[i].focus();
      };
      const arrow = sorted === "ascending" ? " ▲" : sorted === "descending" ? " ▼" : "";
      return element("th", { class: number ? "number" : null, scope: "col", "aria-sort": sorted }, element("button", { type: "button", click: press }, title, element("span", { "aria-hidden": "true" }, arrow)));
    });
    const body = order.map((row) =>
      element("tr", { class: row.client !== undefined && row.client === state.client ? "on" : null }, ...row.cells.map((cell, i) => {
        const top = best[i] !== null && value(cell) === best[i];
        const kinds = [columns[i].number && "number", top && "best", !columns[i].number && text(cell).length < 27 && "short"];
        const attributes = { class: kinds.filter(Boolean).join(" ") || null, scope: i ? null : "row" };
        return element(i ? "td" : "th", attributes, text(cell));
      })),
    );
    wrap.replaceChildren(element("table", { class: "data" }, element("thead", {}, element("tr", {}, ...headings)), element("tbody", {}, ...body)));
  };
  fill();
  return wrap;
}

const tableCsv = (columns, rows) => [columns.map(({ title }) => title), ...rows.map((row) => row.cells.map((cell) => (Array.isArray(cell) ? cell[1] : cell)))];

// A fold that stays open when the page is drawn again, and is filled when it is opened first.
function fold(id, title, make) {
  const details = element("details", { open: state.open.has(id) }, element("summary", {}, title));
  const fill = () => {
    if (details.childElementCount === 1) details.append(make());
  };
  details.fill = fill;
  details.addEventListener("toggle", () => {
    if (details.open) {
      state.open.add(id);
      fill();
    } else state.open.delete(id);
  });
  if (state.open.has(id)) fill();
  return details;
}
