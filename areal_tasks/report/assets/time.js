// Where the time of the runs went: what their services worked on and waited for, and what limits them.
import { el, table } from "./dom.js";

/** The section of times; nothing for runs without samples of their services. */
export function timeSection(data) {
  const runs = data.runs.filter((run) => run.time);
  if (!runs.length) return null;
  const about = el("p", { class: "quiet" }, "Shares of the time in which the services ran, by samples; servers, and workers, are taken together.");
  return el("section", { id: "time" }, el("h2", {}, "Where the time goes"), about, runs.map((run) => runTime(run, data.runs.length > 1)));
}

function runTime(run, named) {
  return el("article", { class: "facts" }, named ? el("h3", {}, run.name) : null, el("p", {}, run.time.says), table(run.time.table));
}
