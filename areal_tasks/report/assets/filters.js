// Which samples are listed, and in which order.
import { button, el, labelled, select } from "./dom.js";
import { KINDS } from "./data.js";

const KIND_ORDER = Object.keys(KINDS); // what is trained on comes before evaluations

const ORDERS = {
  best: ["best first", (a, b) => reward(b, -Infinity) - reward(a, -Infinity) || newest(a, b)],
  worst: ["worst first", (a, b) => reward(a, Infinity) - reward(b, Infinity) || newest(a, b)],
  oldest: ["oldest first", (a, b) => time(a) - time(b)],
  newest: ["newest first", (a, b) => newest(a, b)],
  longest: ["longest first", (a, b) => length(b) - length(a)],
  prompt: ["by prompt, through time", (a, b) => a.prompt_id - b.prompt_id || time(a) - time(b)],
};

const reward = (sample, without) => sample.reward ?? without;
const time = (sample) => sample.evaluated ?? sample.it;
const newest = (a, b) => KIND_ORDER.indexOf(a.table) - KIND_ORDER.indexOf(b.table) || time(b) - time(a);
const length = (sample) => sample.num_generated ?? sample.num_tokens ?? 0;

/** The form of filters. `changed()` is called after each change; `chosen(samples)` filters and sorts. */
export function makeFilters(data, changed) {
  const fields = { ...choices(data, changed), ...numberFields(changed), search: searchField("search", changed), order: orderField(data, changed) };
  const empty = new Map(Object.entries(fields).map(([name, { input }]) => [name, input.value]));
  const reset = () => {
    for (const [name, { input }] of Object.entries(fields)) input.value = empty.get(name);
    changed();
  };
  const form = el("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, ["search", "order", "run", "kind", "verdict", "why"].filter((name) => fields[name]).map((name) => labelled(fields[name].title, fields[name].input)), between("Iteration", fields.from, fields.to), between("Reward", fields.least, fields.most), labelled(fields.prompt.title, fields.prompt.input));
  return { form, fields, reset: button("reset filters", reset, { class: "small" }), chosen: (samples) => samples.filter((sample) => passes(sample, fields)).sort(ORDERS[fields.order.input.value][1]) };
}

function choices(data, changed) {
  const found = {
    run: ["Run", data.runs.map((run) => [String(run.index), run.name])],
    kind: ["Of", distinct(data.samples.map((sample) => sample.table)).map((kind) => [kind, KINDS[kind]])],
    verdict: ["Verdict", distinct(data.samples.map((sample) => sample.verdict)).map((verdict) => [verdict, verdict])],
    why: ["Chosen as", distinct(data.samples.flatMap((sample) => sample.why)).map((why) => [why, why])],
  };
  const useful = Object.entries(found).filter(([, [, options]]) => options.length > 1);
  return Object.fromEntries(useful.map(([name, [title, options]]) => [name, { title, input: select([["", "all"], ...options], changed, { name }) }]));
}

function distinct(values) {
  return [...new Set(values.filter((value) => value !== undefined))].sort();
}

function numberFields(changed) {
  const titles = { from: "Iteration from", to: "Iteration to", least: "Reward from", most: "Reward to", prompt: "Prompt number" };
  return Object.fromEntries(Object.entries(titles).map(([name, title]) => [name, { title, input: el("input", { type: "number", step: "any", name, oninput: changed, "aria-label": title }) }]));
}

/** Two bounds of one quantity as one field. */
function between(title, low, high) {
  return el("div", { class: "field" }, el("span", {}, title), el("div", { class: "between" }, low.input, "–", high.input));
}

function searchField(name, changed) {
  return { title: "Search", input: el("input", { type: "search", name, oninput: changed, placeholder: "text of prompt, completion, answer" }) };
}

function orderField(data, changed) {
  const judged = data.samples.some((sample) => sample.reward !== undefined);
  const options = Object.entries(ORDERS).filter(([name]) => judged || !["best", "worst"].includes(name)).map(([name, [title]]) => [name, title]);
  return { title: "Order", input: select(options, changed, { name: "order" }) };
}

function passes(sample, fields) {
  const value = (name) => fields[name]?.input.value ?? "";
  const same = (name, own) => value(name) === "" || value(name) === String(own);
  const within = (low, high, own) => (value(low) === "" || own >= Number(value(low))) && (value(high) === "" || own <= Number(value(high)));
  return (
    sample.run.visible &&
    same("run", sample.run.index) &&
    same("kind", sample.table) &&
    same("verdict", sample.verdict) &&
    same("prompt", sample.prompt_id) &&
    (value("why") === "" || sample.why.includes(value("why"))) &&
    within("from", "to", time(sample)) &&
    ((value("least") === "" && value("most") === "") || ((sample.reward ?? null) !== null && within("least", "most", sample.reward))) &&
    sample.text.includes(value("search").toLowerCase())
  );
}
