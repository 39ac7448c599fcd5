// The page itself: summary, controls, and every view in its section.

function picker(key, options, label) {
  const names = Object.keys(options);
  const select = element("select", { "data-key": key, change: (event) => {
    state[key] = event.target.value;
    render();
  } }, ...names.map((name) => element("option", { value: name, selected: state[key] === name }, options[name])));
  return element("label", {}, label, select);
}

function checker(key, label) {
  return element("label", {}, element("input", { type: "checkbox", checked: state[key], change: (event) => {
    state[key] = event.target.checked;
    render();
  } }), label);
}

function choose(client) {
  state.client = client;
  render();
}

function redraw(id) {
  const view = views.find((other) => other.id === id);
  const section = document.getElementById(id);
  const [about, controls, figure, downloads] = ["p", ".controls", "figure", ".downloads"].map((selector) => section.querySelector(`:scope > ${selector}`));
  const missing = view.missing?.() ?? null;
  const focused = controls.contains(document.activeElement) ? [...controls.querySelectorAll("select, input, button")].indexOf(document.activeElement) : -1;
  const open = figure.querySelector("details")?.open;
  about.textContent = missing ?? view.about();
  controls.replaceChildren(...(missing === null ? (view.controls?.() ?? []) : []));
  if (focused >= 0) controls.querySelectorAll("select, input, button")[focused]?.focus();
  figure.replaceChildren();
  downloads.hidden = missing !== null;
  if (missing === null) view.draw(figure);
  if (open) figure.querySelector("details").open = true;
}

function render() {
  if (!run().clients.includes(state.client)) state.client = null;
  if (!(state.stage in stages())) state.stage = "round";
  hideTip();
  document.getElementById("choices").replaceChildren(...choices());
  for (const view of views) redraw(view.id);
  drawSetup();
  drawPrivacy();
}

function choices() {
  const runs = element("select", { id: "run", change: (event) => {
    stopPlaying();
    [state.run, state.round] = [Number(event.target.value), null];
    render();
  } }, ...story.runs.map((other, index) => element("option", { value: index, selected: index === state.run }, runName(other))));
  const clients = element("select", { id: "client", change: (event) => choose(event.target.selectedIndex ? run().clients[event.target.selectedIndex - 1] : null) }, element("option", {}, "all"), ...run().clients.map((name) => element("option", { selected: name === state.client }, name)));
  const controls = [element("label", {}, "Client", clients)];
  if (story.runs.length > 1) controls.unshift(element("label", {}, "Run", runs));
  if (state.client !== null) controls.push(element("button", { type: "button", click: () => choose(null) }, "all clients"));
  return controls;
}

function drawSummary(section) {
  const list = (lines) => element("ul", {}, ...lines.map((line) => element("li", {}, line)));
  const [first, ...others] = story.summary.paragraphs;
  section.append(element("h3", {}, first.about), list(first.lines));
  const { header, rows } = story.summary.table;
  const number = (index) => (index > 2 ? "number" : null);
  const head = element("tr", {}, ...header.map((text, index) => element("th", { class: number(index) }, text)));
  const body = rows.map((row) => element("tr", {}, ...row.map((text, index) => element("td", { class: number(index) }, text))));
  section.append(element("div", { class: "scroll" }, element("table", {}, head, ...body)));
  for (const { about, lines } of others) section.append(element("details", {}, element("summary", {}, about), list(lines)));
}

function drawSetup() {
  const { settings, differing, environments } = story.setup;
  const labels = story.families.map((family) => family.label);
  const table = (rows, head) => element("div", { class: "scroll" }, element("table", {}, ...(head ? [element("tr", {}, ...head.map((text) => element("th", {}, text)))] : []), ...rows.map(([key, ...cells]) => element("tr", {}, element("td", { class: "key" }, key), ...cells.map((cell) => element("td", { class: "value" }, cell))))));
  const parts = [];
  if (differing.length) parts.push(element("p", {}, "Settings in which the runs differ:"), table(settings.filter(([key]) => differing.includes(key)), ["", ...labels]));
  parts.push(element("details", {}, element("summary", {}, "All settings"), table(settings, several ? ["", ...labels] : null)));
  parts.push(element("details", {}, element("summary", {}, `Environment of ${runName(run())}`), table([["folder", run().folder], ...Object.entries(environments[state.run])])));
  document.getElementById("setup-parts").replaceChildren(...parts);
}

function drawPrivacy() {
  const part = document.getElementById("privacy-parts");
  const table = run().privacy;
  if (!part) return;
  if (!table) return part.replaceChildren(element("p", {}, `${runName(run())} was trained without [privacy] and has not been audited.`));
  const cells = (tag, texts) => element("tr", {}, ...texts.map((text, index) => element(tag, { class: index ? "number" : null }, text)));
  const about = "Epsilon bounds what a client's models reveal about its training samples. The other columns are the AUC of membership inference attacks with 95 % confidence intervals, from `fedme audit`: 0.5 is guessing.";
  part.replaceChildren(element("p", {}, about), element("div", { class: "scroll" }, element("table", {}, cells("th", table.header), ...table.rows.map((row) => cells("td", row)))));
}

function start() {
  const dark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const theme = element("button", { type: "button", id: "theme", click: () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
  } }, "light / dark");
  const sections = views.map((view) =>
    element("section", { id: view.id }, element("h2", {}, view.title), element("p"), element("div", { class: "controls" }), element("figure"), element("div", { class: "downloads" }, ...["svg", "png", "pdf"].map((format) => element("button", { type: "button", title: `save this chart as ${format.toUpperCase()}`, click: () => save(view.id, format) }, format.toUpperCase())))),
  );
  const summary = element("section", { id: "summary" }, element("h2", {}, "Summary"));
  drawSummary(summary);
  const setup = element("section", { id: "setup" }, element("h2", {}, "Configuration and environment"), element("div", { id: "setup-parts" }));
  const anyPrivacy = story.runs.some((other) => other.privacy);
  const privacy = anyPrivacy ? [element("section", { id: "privacy" }, element("h2", {}, "Privacy"), element("div", { id: "privacy-parts" }))] : [];
  const links = [["summary", "Summary"], ...views.map((view) => [view.id, view.title]), ...(anyPrivacy ? [["privacy", "Privacy"]] : []), ["setup", "Configuration"]];
  document.getElementById("page").append(
    element("header", {}, element("h1", {}, story.title), theme),
    element("nav", { "aria-label": "sections" }, ...links.map(([id, title]) => element("a", { href: `#${id}` }, title))),
    element("div", { class: "chooser" }, element("div", { id: "choices" })),
    element("main", {}, summary, ...sections, ...privacy, setup),
  );
  render();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone shows or hides its address bar
    width = innerWidth;
    render();
  });
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
}

start();
