"use strict";
// What is shown: the data, the choices of the reader, and both in the address of the page.

const story = JSON.parse(document.getElementById("data").textContent);
const several = story.families.length > 1;
const views = []; // {id, title, about, controls?, missing?, draw, csv} in page order
const headline = Object.keys(story.curves.metrics)[0]; // the headline metric
const initial = { run: story.first, client: null, split: Object.keys(story.curves.splits)[0], metric: headline, stage: "round", against: null, log: false, late: false, round: null };
const state = { ...initial, section: null, sort: {}, open: new Set() };

const run = () => story.runs[state.run];
const family = () => story.families[run().family];
const runName = ({ family, seed }) => story.families[family].label + (story.runs.filter((other) => other.family === family).length > 1 ? `, seed ${seed}` : "");
const clientName = (index) => `client ${run().clients[index]}`;
const clientIndex = () => (state.client === null ? -1 : run().clients.indexOf(state.client));

// "#gain&run=fedme&client=7&sort.summary=2d": the section, then every choice that is not the initial one.
const coded = (text) => encodeURIComponent(text).replaceAll("%20", "+");
const decoded = (text) => {
  try {
    return decodeURIComponent(text.replaceAll("+", " "));
  } catch {
    return text;
  }
};

function writeAddress() {
  const words = state.section ? [coded(state.section)] : [];
  for (const [key, first] of Object.entries(initial)) {
    if (state[key] === first) continue;
    const value = key === "run" ? runName(run()) : state[key] === true ? "yes" : state[key] === false ? "no" : `${state[key]}`;
    words.push(`${key}=${coded(value)}`);
  }
  for (const [table, order] of Object.entries(state.sort)) words.push(`sort.${coded(table)}=${coded(order)}`);
  try {
    history.replaceState(null, "", words.length ? `#${words.join("&")}` : location.pathname + location.search);
  } catch {
    // a page without an address of its own, as in a preview, keeps no choices
  }
}

function readAddress() {
  Object.assign(state, initial, { section: null, sort: {} });
  for (const word of location.hash.slice(1).split("&").filter(Boolean)) {
    const at = word.indexOf("=");
    const [key, value] = at < 0 ? ["section", decoded(word)] : [decoded(word.slice(0, at)), decoded(word.slice(at + 1))];
    if (key === "run") {
      const index = story.runs.findIndex((other) => runName(other) === value);
      if (index >= 0) state.run = index;
    } else if (key.startsWith("sort.")) {
      if (/^\d+[ad]$/.test(value)) state.sort[key.slice(5)] = value;
    } else if (key === "log" || key === "late") state[key] = value === "yes";
    else if (key === "round") state.round = /^\d+$/.test(value) ? Number(value) : null;
    else if (["section", "client", "against", "stage"].includes(key)) state[key] = value;
    else if (key === "split" && value in story.curves.splits) state.split = value;
    else if (key === "metric" && value in story.curves.metrics) state.metric = value;
  }
}
