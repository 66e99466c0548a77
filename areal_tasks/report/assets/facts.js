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
  const about = "What a run built itself: history that it shares with a parent, and the run of its warm start, are not counted. Stages may run side by side, and the wall time holds what is in no stage: starts, waits, commits, work that a crash lost.";
  return runsSection(data, "cost", "Cost", about, (cost) => [facts(cost.facts), table(cost.stages)], "facts cost");
}

/** The section of times; nothing for runs without samples of their services. */
export function timeSection(data) {
  const about = "Shares of the time in which the services ran, by samples; servers, and workers, are taken together.";
  return runsSection(data, "time", "Where the time goes", about, (time) => [el("p", {}, whole(time.says)), table(time.table, whole)]);
}

/** A section with an article for each run that has `key`, named if there are several runs; nothing if none has it. */
function runsSection(data, key, title, about, body, style = "facts") {
  const runs = data.runs.filter((run) => run[key]);
  if (!runs.length) return null;
  const named = data.runs.length > 1;
  const articles = runs.map((run) => el("article", { class: style }, named ? el("h3", {}, run.name) : null, body(run[key])));
  return el("section", { id: key }, el("h2", {}, title), el("p", { class: "quiet" }, about), articles);
}

/** The text without line breaks between a number and its percent sign. */
function whole(text) {
  return text.replaceAll(" %", "\u00a0%");
}
