// What is known of the runs in words: where their time went, what they cost, facts, log, recipe, differences.
import { el, facts, table } from "./dom.js";
import { shown } from "./format.js";

const cell = (text) => el("span", {}, shown(text));

/** The section of facts. */
export function factsSection(data) {
  const compared = data.differences.length > 1 ? folded("Recipe fields that differ", table(data.differences, cell), true) : null;
  const same = data.differences.length === 1 ? el("p", {}, "The recipes are the same.") : null;
  return el("section", { id: "facts" }, el("h2", {}, data.runs.length > 1 ? "Runs" : "Run"), compared, same, data.runs.map((run) => runFacts(run, data.runs.length > 1)));
}

function runFacts(run, named) {
  const recipe = [["field", "value"], ...Object.entries(run.recipe)];
  return el(
    "article",
    { class: "facts" },
    named ? el("h3", {}, run.name) : null,
    facts(run.facts, shown),
    folded(`Starts (${run.starts.length - 1})`, table(run.starts, cell)),
    folded(`Recipe segments (${run.segments.length - 1})`, table(run.segments, cell)),
    run.log.length > 1 ? folded(`Log (${run.log.length - 1})`, table(run.log, cell)) : null,
    folded("Recipe", table(recipe, cell)),
  );
}

function folded(title, body, open = false) {
  return el("details", { open }, el("summary", {}, title), body);
}

/** The section of costs; nothing for runs without a commit. */
export function costSection(data) {
  const runs = data.runs.filter((run) => run.cost);
  if (!runs.length) return null;
  const about = el("p", { class: "quiet" }, "What a run built itself: history that it shares with a parent, and the run of its warm start, are not counted. Stages may run side by side, and the wall time holds what is in no stage: starts, waits, commits, work that a crash lost.");
  return el("section", { id: "cost" }, el("h2", {}, "Cost"), about, runs.map((run) => runCost(run, data.runs.length > 1)));
}

function runCost(run, named) {
  return el("article", { class: "facts cost" }, named ? el("h3", {}, run.name) : null, facts(run.cost.facts), table(run.cost.stages));
}

/** The section of times; nothing for runs without samples of their services. */
export function timeSection(data) {
  const runs = data.runs.filter((run) => run.time);
  if (!runs.length) return null;
  const about = el("p", { class: "quiet" }, "Shares of the time in which the services ran, by samples; servers, and workers, are taken together.");
  return el("section", { id: "time" }, el("h2", {}, "Where the time goes"), about, runs.map((run) => runTime(run, data.runs.length > 1)));
}

function runTime(run, named) {
  return el("article", { class: "facts" }, named ? el("h3", {}, run.name) : null, el("p", {}, whole(run.time.says)), table(run.time.table, whole));
}

/** The text without line breaks between a number and its percent sign. */
function whole(text) {
  return text.replaceAll(" %", "\u00a0%");
}
