// Puts the page together.
import { button, el } from "./dom.js";
import { load } from "./data.js";
import { redrawAll, view } from "./chart.js";
import { colourOf, curvesSection } from "./curves.js";
import { costSection, factsSection, timeSection } from "./facts.js";
import { rolloutsSection } from "./rollouts.js";

function runChip(data, run, changed) {
  const many = data.runs.length > 1;
  const parts = [many ? el("span", { class: `swatch ${colourOf(run.index)}` }) : null, el("b", {}, run.name), run.label ? el("span", { class: "label" }, run.label) : null];
  const chip = many ? button("", () => {
    run.visible = !run.visible;
    chip.setAttribute("aria-pressed", String(run.visible));
    changed();
  }, { class: "chip", "aria-pressed": "true", title: "Show or hide this run" }) : el("span", { class: "chip" });
  chip.append(...parts.filter((part) => part));
  return el("div", { class: "run" }, chip, el("span", { class: "quiet" }, `${run.flow} · ${run.state}`), run.problems.map((problem) => el("p", { class: "problem" }, problem)));
}

function build() {
  const data = load();
  const rollouts = rolloutsSection(data);
  const curves = curvesSection(data);
  const cost = costSection(data);
  const time = timeSection(data);
  view.choose = (x) => (x === null ? undefined : rollouts?.only(Math.floor(x)));
  const changed = () => {
    redrawAll();
    rollouts?.update();
  };
  const links = [curves ? ["#curves", "Curves"] : null, rollouts ? ["#rollouts", rollouts.title] : null, time ? ["#time", "Time"] : null, cost ? ["#cost", "Cost"] : null, ["#facts", data.runs.length > 1 ? "Runs" : "Run"]].filter((link) => link);
  const top = el("header", { class: "top" }, el("h1", {}, data.runs.map((run) => run.name).join(" · ")), el("nav", {}, links.map(([href, text]) => el("a", { href }, text))), data.runs.map((run) => runChip(data, run, changed)));
  const sections = [top, curves, rollouts?.node, time, cost, factsSection(data), el("footer", { class: "quiet" }, `Made ${data.made} by arealflow report.`)];
  document.getElementById("page").append(...sections.filter((section) => section));
}

build();
