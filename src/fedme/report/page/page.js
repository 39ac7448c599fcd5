// The page itself: words, controls, and every view in its section.

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
  const view = views.find((each) => each.id === id);
  const section = document.getElementById(id);
  const [about, controls, figure, takes] = ["p", ".controls", "figure", ".takes"].map((each) => section.querySelector(`:scope > ${each}`));
  const missing = view.missing?.() ?? null;
  const focused = controls.contains(document.activeElement) ? [...controls.querySelectorAll("select, input, button")].indexOf(document.activeElement) : -1;
  const open = figure.querySelector("details")?.open;
  about.textContent = missing ?? view.about();
  controls.replaceChildren(...(missing === null ? (view.controls?.() ?? []) : []));
  if (focused >= 0) controls.querySelectorAll("select, input, button")[focused]?.focus();
  figure.replaceChildren();
  takes.hidden = missing !== null;
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
  } }, ...story.runs.map((each, index) => element("option", { value: index, selected: index === state.run }, runName(each))));
  const clients = element("select", { id: "client", change: (event) => choose(event.target.selectedIndex ? run().clients[event.target.selectedIndex - 1] : null) }, element("option", {}, "all"), ...run().clients.map((name) => element("option", { selected: name === state.client }, name)));
  const found = [element("label", {}, "Client", clients)];
  if (story.runs.length > 1) found.unshift(element("label", {}, "Run", runs));
  if (state.client !== null) found.push(element("button", { type: "button", click: () => choose(null) }, "all clients"));
  return found;
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
  if (differing.length) parts.push(element("p", {}, "The settings in which the runs differ:"), table(settings.filter(([key]) => differing.includes(key)), ["", ...labels]));
  parts.push(element("details", {}, element("summary", {}, "All settings"), table(settings, several ? ["", ...labels] : null)));
  parts.push(element("details", {}, element("summary", {}, `Environment of ${runName(run())}`), table([["folder", run().folder], ...Object.entries(environments[state.run])])));
  document.getElementById("setup-parts").replaceChildren(...parts);
}

function drawPrivacy() {
  const part = document.getElementById("privacy-parts");
  const found = run().privacy;
  if (!part) return;
  if (!found) return part.replaceChildren(element("p", {}, `${runName(run())} was not private, and nobody has audited it.`));
  const cells = (kind, texts) => element("tr", {}, ...texts.map((text, index) => element(kind, { class: index ? "number" : null }, text)));
  const about = "Epsilon is what a client's training samples may at most have told through its models. The other columns are the areas under the curve of attacks that tell training samples from others, with their 95 % intervals: 0.5 is guessing. `fedme audit` makes them.";
  part.replaceChildren(element("p", {}, about), element("div", { class: "scroll" }, element("table", {}, cells("th", found.header), ...found.rows.map((row) => cells("td", row)))));
}

function start() {
  const dark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const theme = element("button", { type: "button", id: "theme", click: () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
  } }, "light / dark");
  const sections = views.map((view) =>
    element("section", { id: view.id }, element("h2", {}, view.title), element("p"), element("div", { class: "controls" }), element("figure"), element("div", { class: "takes" }, ...["svg", "png", "pdf"].map((kind) => element("button", { type: "button", title: `save this chart as ${kind.toUpperCase()}`, click: () => take(view.id, kind) }, kind.toUpperCase())))),
  );
  const summary = element("section", { id: "summary" }, element("h2", {}, "In words"));
  drawSummary(summary);
  const setup = element("section", { id: "setup" }, element("h2", {}, "Configuration and environment"), element("div", { id: "setup-parts" }));
  const told = story.runs.some((each) => each.privacy);
  const privacy = told ? [element("section", { id: "privacy" }, element("h2", {}, "Privacy"), element("div", { id: "privacy-parts" }))] : [];
  const links = [["summary", "In words"], ...views.map((view) => [view.id, view.title]), ...(told ? [["privacy", "Privacy"]] : []), ["setup", "Configuration"]];
  document.getElementById("page").append(
    element("header", {}, element("h1", {}, story.title), theme),
    element("nav", { "aria-label": "sections" }, ...links.map(([id, title]) => element("a", { href: `#${id}` }, title))),
    element("div", { class: "chooser" }, element("div", { id: "choices" })),
    element("main", {}, summary, ...sections, ...privacy, setup),
  );
  render();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone's address bar coming and going
    width = innerWidth;
    render();
  });
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
}

start();
