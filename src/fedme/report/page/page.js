// The page itself: controls, and every view in its section.

function picker(key, options, label, chosen = state[key]) {
  const names = Object.keys(options);
  const select = element("select", { "data-key": key, change: (event) => {
    state[key] = event.target.value;
    render();
  } }, ...names.map((name) => element("option", { value: name, selected: chosen === name }, options[name])));
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

function csvButton(id, make) {
  return element("div", { class: "downloads" }, element("button", { type: "button", "aria-label": `numbers of ${id} as CSV`, click: () => download(fileName(id, "csv"), new Blob([csv(make())], { type: "text/csv" })) }, "CSV"));
}

// Go to a section; the address remembers it.
function visit(id) {
  state.section = id;
  render();
  const section = document.getElementById(id);
  section?.scrollIntoView();
  section?.querySelector("h2")?.focus({ preventScroll: true });
}

function redraw(id) {
  const view = views.find((other) => other.id === id);
  const section = document.getElementById(id);
  const [about, controls, figure, downloads] = ["p", ".controls", "figure", ".downloads"].map((selector) => section.querySelector(`:scope > ${selector}`));
  const missing = view.missing?.() ?? null;
  const inside = (part) => part.contains(document.activeElement);
  const focused = inside(controls) ? [...controls.querySelectorAll("select, input, button")].indexOf(document.activeElement) : -1;
  const reading = inside(figure) && document.activeElement.matches("svg");
  section.classList.toggle("empty", missing !== null);
  about.replaceChildren(...prose(missing ?? view.about()));
  controls.replaceChildren(...(missing === null ? (view.controls?.() ?? []) : []));
  if (focused >= 0) controls.querySelectorAll("select, input, button")[focused]?.focus();
  figure.replaceChildren();
  downloads.hidden = missing !== null;
  if (missing === null) view.draw(figure);
  if (reading) figure.querySelector("svg")?.focus({ preventScroll: true });
  const link = document.querySelector(`nav a[href="#${id}"]`);
  if (link) link.classList.toggle("empty", missing !== null);
}

function render() {
  if (!run().clients.includes(state.client)) state.client = null;
  if (!(state.stage in stages())) state.stage = "round";
  writeAddress();
  hideTip();
  const focused = document.activeElement?.id;
  document.getElementById("choices").replaceChildren(...choices());
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  drawTiles();
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
  if (state.client !== null) controls.push(element("button", { type: "button", id: "all-clients", click: () => choose(null) }, "all clients"));
  return controls;
}

function drawSetup() {
  const { settings, differing, environments } = story.setup;
  const labels = story.families.map((family) => family.label);
  const table = (rows, head, label) => element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, element("table", {}, ...(head ? [element("thead", {}, element("tr", {}, ...head.map((text) => element(text ? "th" : "td", text ? { scope: "col" } : {}, text))))] : []), element("tbody", {}, ...rows.map(([key, ...cells]) => element("tr", {}, element("th", { class: "key", scope: "row" }, key), ...cells.map((cell) => element("td", { class: "value" }, cell)))))));
  const parts = [];
  if (differing.length) parts.push(element("p", {}, "Settings in which the runs differ:"), table(settings.filter(([key]) => differing.includes(key)), ["", ...labels], "settings in which the runs differ"));
  parts.push(fold("settings", "All settings", () => table(settings, several ? ["", ...labels] : null, "all settings")));
  parts.push(fold("environment", `Environment of ${runName(run())}`, () => table([["folder", run().folder], ...Object.entries(environments[state.run])], null, "environment")));
  document.getElementById("setup-parts").replaceChildren(...parts);
}

function drawPrivacy() {
  const part = document.getElementById("privacy-parts");
  const table = run().privacy;
  if (!part) return;
  if (!table) return part.replaceChildren(element("p", {}, `${runName(run())} was trained without [privacy] and has not been audited.`));
  const about = "Epsilon bounds what a client's models reveal about its training samples. The other columns are the AUC of membership inference attacks with 95 % confidence intervals, from `fedme audit`: 0.5 is guessing.";
  const columns = table.header.map((title, i) => ({ title, number: i > 0 }));
  const value = (text) => (Number.isNaN(parseFloat(text)) ? text : [text, parseFloat(text)]);
  const rows = table.rows.map(([client, ...cells]) => ({ client, cells: [client, ...cells.map(value)] }));
  part.replaceChildren(element("p", {}, ...prose(about)), dataTable("privacy", "privacy of every client", columns, rows), csvButton("privacy", () => [table.header, ...table.rows]));
}

function start() {
  const dark = () => (document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const theme = element("button", { type: "button", id: "theme", click: () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
  } }, "light / dark");
  const formats = (view) => ["svg", "png", "pdf", "csv"].map((format) => element("button", { type: "button", "aria-label": format === "csv" ? `numbers of ${view.title} as CSV` : `chart ${view.title} as ${format.toUpperCase()}`, click: () => save(view.id, format) }, format.toUpperCase()));
  const heading = (title) => element("h2", { tabindex: -1 }, title);
  const sections = views.map((view) => element("section", { id: view.id }, heading(view.title), element("p"), element("div", { class: "controls" }), element("figure"), element("div", { class: "downloads" }, ...formats(view))));
  const summary = element("section", { id: "summary" }, heading(several ? "All runs" : "Summary"));
  const setup = element("section", { id: "setup" }, heading("Configuration and environment"), element("div", { id: "setup-parts" }));
  const anyPrivacy = story.runs.some((other) => other.privacy);
  const privacy = anyPrivacy ? [element("section", { id: "privacy" }, heading("Privacy"), element("div", { id: "privacy-parts" }))] : [];
  const first = element("section", { id: "first", "aria-label": "overview" }, element("p", { id: "whose" }), element("ul", { id: "tiles" }), element("h2", { class: "next" }, "What to look at next"), element("ol", { id: "next" }));
  const links = [["summary", several ? "All runs" : "Summary"], ...views.map((view) => [view.id, view.title]), ...(anyPrivacy ? [["privacy", "Privacy"]] : []), ["setup", "Configuration"]];
  const link = ([id, title]) => element("a", { href: `#${id}`, click: (event) => {
    event.preventDefault();
    visit(id);
  } }, title);
  document.getElementById("page").append(
    element("header", {}, element("h1", {}, story.title), theme),
    element("div", { class: "chooser", role: "region", "aria-label": "run and client" }, element("div", { id: "choices" })),
    element("main", {}, ...drawNotes(), first, element("nav", { "aria-label": "sections" }, ...links.map(link)), summary, ...sections, ...privacy, setup),
  );
  readAddress();
  drawSummary(summary);
  render();
  if (state.section) document.getElementById(state.section)?.scrollIntoView();
  addEventListener("hashchange", () => {
    readAddress();
    stopPlaying();
    render();
    document.getElementById(state.section)?.scrollIntoView();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone shows or hides its address bar
    width = innerWidth;
    render();
  });
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) {
      if (!fewClients() && details.closest("#clients, #gain")) continue; // a table of all clients would fill dozens of pages
      details.fill?.();
      details.open = true;
    }
  });
}

start();
