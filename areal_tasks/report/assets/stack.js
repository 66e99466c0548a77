// Areas on top of each other, one chart a run: seconds of each stage, shares of each lag.
import { card, entry, frame } from "./chart.js";
import { extent, formatOf, nearest } from "./scales.js";
import { svg } from "./dom.js";
import { num, percent } from "./format.js";

/** The stages, in the order of their colours: each has the same one in every run. */
const STAGES = ["rollout", "train", "verify", "advantage", "publish", "evaluate", "reference", "proximal", "scalars", "prompts", "initialise", "batch"];
const OTHER = STAGES.length;
const FEW_BARS = 20;
const LABEL_WIDTH = 60;

export function stageColour(stage) {
  const known = STAGES.indexOf(stage);
  return `c${known < 0 ? OTHER : known}`;
}

const seconds = (value) => `${num(value, 3)} s`;

/** A stacked chart of lines that share their x: seconds, or shares. */
export function stackChart(spec, lines) {
  const xs = () => lines[0].x;
  const read = (x) => lines.map((line) => areaEntry(line, x, lines, spec.percent ? percent : seconds));
  return card({ ...spec, wide: true }, { paint: (width) => paintStack(width, spec, lines), read, xs });
}

function areaEntry(line, x, lines, format) {
  if (x !== null) return entry(line, format(line.y[nearest(line.x, x)]), "");
  const all = lines.reduce((sum, other) => sum + total(other), 0);
  return entry(line, `${num((100 * total(line)) / (all || 1), 3)} %`, "");
}

function total(line) {
  return line.y.reduce((sum, value) => sum + (value || 0), 0);
}

function paintStack(width, spec, lines) {
  const tops = [new Array(lines[0].x.length).fill(0)];
  for (const line of lines) tops.push(tops.at(-1).map((base, i) => base + (line.y[i] || 0)));
  const [low, high] = extent(lines[0].x);
  const height = tall(tops.at(-1));
  const made = frame(width, [low - 0.5, high + 0.5], [0, height], false, formatOf(spec, 3));
  lines.forEach((line, i) => made.body.append(area(made, line, tops[i], tops[i + 1])));
  made.body.append(...cutMarks(made, lines[0].x, tops.at(-1), height));
  return made;
}

/** The height of the axis: that of the highest bar; among many bars all but the highest, where these dwarf the others. */
function tall(tops) {
  if (tops.length <= FEW_BARS) return Math.max(...tops) * 1.05 || 1;
  const sorted = [...tops].sort((a, b) => a - b);
  const usual = sorted[Math.floor(0.98 * (sorted.length - 1))];
  return (sorted.at(-1) > 3 * usual && usual > 0 ? 1.5 * usual : sorted.at(-1)) * 1.05 || 1;
}

/** A mark at the top of each bar that is cut off, with its value; close together, the greatest of their values. */
function cutMarks(made, xs, tops, height) {
  const cut = xs.map((x, i) => ({ at: made.x.at(x), top: tops[i] })).filter(({ top }) => top > height);
  const label = (x, anchor, text) => svg("text", { class: "cut", x, y: made.y.range[1] + 9, "text-anchor": anchor }, text);
  return clusters(cut).flatMap((near) => {
    const toRight = near.at(-1).at + LABEL_WIDTH < made.x.range[1];
    const value = `${near.length > 1 ? "≤ " : ""}${seconds(Math.max(...near.map(({ top }) => top)))}`;
    const text = toRight ? label(near.at(-1).at + 7, "start", value) : label(near[0].at - 7, "end", value);
    return [...near.map(({ at }) => label(at, "middle", "▲")), text];
  });
}

function clusters(marks) {
  const found = [];
  for (const mark of marks) {
    if (found.length && mark.at - found.at(-1).at(-1).at < LABEL_WIDTH) found.at(-1).push(mark);
    else found.push([mark]);
  }
  return found;
}

function area(made, line, below, above) {
  const half = (made.x.at(1) - made.x.at(0)) / 2;
  const edge = (values) => values.flatMap((value, i) => sides(made, line.x[i], value, half));
  const points = [...edge(above), ...edge(below).reverse()];
  return svg("path", { class: `area ${line.colour}`, d: `M${points.join("L")}Z` });
}

function sides(made, x, value, half) {
  const y = Math.max(made.y.at(value), 0).toFixed(1);
  const centre = made.x.at(x);
  return [`${(centre - half).toFixed(1)} ${y}`, `${(centre + half).toFixed(1)} ${y}`];
}
