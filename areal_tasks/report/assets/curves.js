// The section of curves: one chart a quantity, the runs over each other.
import { lineChart, redrawAll, view } from "./chart.js";
import { el, labelled, select } from "./dom.js";
import { stackChart, stageColour } from "./stack.js";

const COLOURS = 10;

export function colourOf(index) {
  return `c${index % COLOURS}`;
}

/** All charts for which some run has lines. */
export function curvesSection(data) {
  const cards = data.charts.flatMap((spec) => (spec.stacked ? stacks(data, spec) : lines(data, spec)));
  if (!cards.length) return null;
  const smooth = select([[1, "off"], [5, "5 points"], [15, "15 points"], [51, "51 points"]], (event) => {
    view.smooth = Number(event.target.value);
    redrawAll();
  }, { id: "smooth" });
  const intro = el("p", { class: "quiet" }, "Over iterations. Move over a chart, or focus it and use the arrow keys, to read values; at rest the last ones are shown. A double click or Enter lists the samples of that iteration.");
  return el("section", { id: "curves" }, el("h2", {}, "Curves"), el("div", { class: "bar" }, intro, labelled("Smoothing", smooth)), el("div", { class: "charts" }, cards));
}

function lines(data, spec) {
  const all = data.runs.flatMap((run) => (run.curves[spec.id] || []).map((line, i) => dressed(data, run, line, i)));
  return all.length ? [lineChart(spec, () => seen(all))] : [];
}

/** The lines of the runs that are shown; bands only where they cannot lie over those of another run. */
function seen(all) {
  const lines = all.filter((line) => line.run.visible);
  const alone = new Set(lines.map((line) => line.run)).size < 2;
  return alone ? lines : lines.map(({ lo, hi, ...line }) => line);
}

const DASHES = ["", "dashed", "dotted"];

function dressed(data, run, line, i) {
  const many = data.runs.length > 1;
  const label = [many ? run.name : "", line.name].filter((part) => part).join(" · ");
  return { ...line, run, label, colour: colourOf(many ? run.index : i), dash: many ? DASHES[i % DASHES.length] : "" };
}

function stacks(data, spec) {
  return data.runs.filter((run) => run.curves[spec.id]).map((run) => {
    const named = run.curves[spec.id].map((line, i) => ({ ...line, label: line.name, colour: spec.id === "stages" ? stageColour(line.name) : `c${i}`, dash: "thick" }));
    const title = data.runs.length > 1 ? `${spec.title} · ${run.name}` : spec.title;
    return stackChart({ ...spec, title, key: `${spec.id}-${run.index}` }, named);
  });
}
