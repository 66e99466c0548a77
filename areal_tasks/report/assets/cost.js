// What the runs cost: tokens, wall time, GPU seconds, and the seconds of each stage.
import { el, facts, table } from "./dom.js";

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
