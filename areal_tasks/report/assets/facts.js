// What is known of the runs in words: facts, starts, segments, log, recipe, and where the recipes differ.
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
