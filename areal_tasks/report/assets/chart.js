// A frame with axes, a cursor that mouse, finger and arrow keys move, and the lines of a chart inside it.
import { button, el, svg } from "./dom.js";
import { extent, formatOf, nearest, padded, scale, smoothed } from "./scales.js";

const HEIGHT = 190;
const MARGIN = { left: 50, right: 10, top: 8, bottom: 22 };

/** What all charts share: where the cursor is, how much is smoothed, who has to draw again, what choosing an x does. */
export const view = { x: null, smooth: 1, charts: [], choose: () => undefined };

export function redrawAll() {
  view.charts.forEach((chart) => chart.draw());
}

function moveCursor(x) {
  view.x = x;
  view.charts.forEach((chart) => chart.point());
}

/** A card around a drawing. `paint(frame)` draws into a frame, `read(x)` gives the read-out's entries at x. */
export function card(spec, { paint, read, xs, log = null }) {
  const plot = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${spec.title}. ${spec.about}` });
  const readout = el("div", { class: "readout", "aria-live": "off" });
  const chart = { frame: null };
  chart.point = () => {
    drawCursor(chart.frame);
    readout.replaceChildren(...read(view.x));
  };
  chart.draw = () => {
    chart.frame = paint(plot.clientWidth || 320);
    plot.replaceChildren(chart.frame ? chart.frame.node : el("p", { class: "quiet" }, "Nothing to draw."));
    chart.point();
  };
  for (const [event, live] of [["focus", "polite"], ["blur", "off"]]) plot.addEventListener(event, () => readout.setAttribute("aria-live", live));
  steer(plot, chart, xs);
  view.charts.push(chart);
  new ResizeObserver(() => chart.draw()).observe(plot);
  const title = el("header", {}, el("h3", {}, spec.title), log ? logToggle(log, chart) : null);
  return el("article", { class: spec.wide ? "chart wide" : "chart", id: `chart-${spec.key || spec.id}` }, title, el("p", { class: "about" }, spec.about), plot, readout);
}

function logToggle(log, chart) {
  const toggle = button("log", () => {
    log.on = !log.on;
    toggle.setAttribute("aria-pressed", String(log.on));
    chart.draw();
  }, { class: "small", "aria-pressed": String(log.on), title: "Logarithmic y axis" });
  return toggle;
}

function steer(plot, chart, xs) {
  const under = (event) => {
    const all = xs();
    if (!chart.frame || !all.length) return;
    const share = event.clientX - plot.getBoundingClientRect().left;
    moveCursor(all[nearest(all, chart.frame.toX(share))]);
  };
  plot.addEventListener("pointermove", under);
  plot.addEventListener("pointerdown", under);
  plot.addEventListener("pointerleave", () => moveCursor(null));
  plot.addEventListener("dblclick", () => view.choose(view.x));
  plot.addEventListener("keydown", (event) => moveByKey(event, xs()));
}

function moveByKey(event, all) {
  if (event.key === "Escape") return moveCursor(null);
  if (event.key === "Enter") return view.choose(view.x);
  const here = view.x === null ? all.length - 1 : nearest(all, view.x);
  const moves = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: all.length - 1, PageUp: here - 10, PageDown: here + 10 };
  if (!(event.key in moves) || !all.length) return undefined;
  event.preventDefault();
  return moveCursor(all[Math.min(all.length - 1, Math.max(0, moves[event.key]))]);
}

/** Axes for a domain of x and y; its `body` takes what is drawn. */
export function frame(width, xDomain, yDomain, log, format) {
  const x = scale(xDomain, [MARGIN.left, width - MARGIN.right]);
  const y = scale(yDomain, [HEIGHT - MARGIN.bottom, MARGIN.top], log);
  const body = svg("g");
  const cursor = svg("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  const node = svg("svg", { width, height: HEIGHT, "aria-hidden": "true" }, yAxis(y, width, format), xAxis(x, xDomain, width), body, cursor);
  const toX = (pixel) => xDomain[0] + ((pixel - MARGIN.left) / (width - MARGIN.left - MARGIN.right || 1)) * (xDomain[1] - xDomain[0]);
  return { node, body, cursor, x, y, toX };
}

function yAxis(y, width, format) {
  return y.ticks(5).map((tick) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y.at(tick), y2: y.at(tick) }),
    svg("text", { class: "tick", x: MARGIN.left - 6, y: y.at(tick) + 4, "text-anchor": "end" }, format(tick)),
  ]);
}

function xAxis(x, domain, width) {
  const whole = x.ticks(Math.max(2, Math.floor(width / 90))).filter((tick) => Number.isInteger(Number(tick.toFixed(6))));
  return whole.map((tick) => svg("text", { class: "tick", x: x.at(tick), y: HEIGHT - 6, "text-anchor": "middle" }, String(Math.round(tick))));
}

function drawCursor(made) {
  if (!made) return;
  made.cursor.setAttribute("visibility", view.x === null ? "hidden" : "visible");
  if (view.x === null) return;
  const at = made.x.at(view.x);
  made.cursor.setAttribute("x1", at);
  made.cursor.setAttribute("x2", at);
}

/** A chart of lines; `visible()` are those that are drawn now. */
export function lineChart(spec, visible) {
  const log = { on: spec.scale === "log" };
  const xs = () => [...new Set(visible().flatMap((line) => line.x))].sort((a, b) => a - b);
  const paint = (width) => paintLines(width, spec, visible().map(withSmoothing), log.on);
  const read = (x) => visible().map((line) => lineEntry(line, x, formatOf(spec)));
  return card(spec, { paint, read, xs, log: spec.scale === "linear" ? null : log });
}

function withSmoothing(line) {
  return { ...line, y: smoothed(line.y, view.smooth) };
}

function paintLines(width, spec, lines, wanted) {
  const log = wanted && lines.some((line) => line.y.some((value) => value > 0)); // else linear: zeros have no logarithm
  const usable = (values) => (log ? values.filter((value) => value > 0) : values);
  const xDomain = extent(lines.flatMap((line) => line.x));
  const y = extent(lines.flatMap((line) => usable([...line.y, ...(line.lo || []), ...(line.hi || [])])));
  if (!xDomain || !y) return null;
  const domain = xDomain[0] === xDomain[1] ? [xDomain[0] - 0.5, xDomain[1] + 0.5] : xDomain;
  const made = frame(width, domain, padded(y, spec, log), log, formatOf(spec, 3));
  for (const line of lines) made.body.append(...lineShapes(made, line, log));
  return made;
}

function lineShapes(made, line, log) {
  const usable = (value) => value !== null && (!log || value > 0);
  const points = line.x.map((x, i) => (usable(line.y[i]) ? [made.x.at(x), made.y.at(line.y[i])] : null));
  const band = line.lo ? svg("path", { class: `band ${line.colour}`, d: bandPath(made, line, usable) }) : null;
  const stroke = svg("path", { class: `line ${line.colour} ${line.dash}`, d: linePath(points) });
  const known = points.filter((point) => point !== null);
  const dots = known.length <= 24 ? known.map(([x, y]) => svg("circle", { class: `dot ${line.colour}`, cx: x, cy: y, r: 2.5 })) : [];
  return [band, stroke, ...dots].filter((shape) => shape !== null);
}

function linePath(points) {
  let pen = "M";
  return points.map((point) => {
    const step = point === null ? "" : `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = point === null ? "M" : "L";
    return step;
  }).join("");
}

function bandPath(made, line, usable) {
  const kept = line.x.map((_, i) => i).filter((i) => usable(line.lo[i]) && usable(line.hi[i]));
  const edge = (values, order) => order.map((i) => `${made.x.at(line.x[i]).toFixed(1)} ${made.y.at(values[i]).toFixed(1)}`);
  return kept.length ? `M${[...edge(line.hi, kept), ...edge(line.lo, [...kept].reverse())].join("L")}Z` : "";
}

function lineEntry(line, x, format) {
  const i = x === null ? line.x.length - 1 : nearest(line.x, x);
  const range = line.lo && x !== null ? ` (${format(line.lo[i])} … ${format(line.hi[i])})` : "";
  const at = `at ${Math.floor(line.x[i])}`;
  return entry(line, `${format(line.y[i])}${range}`, at);
}

/** An entry of a read-out: a piece of the line, its name, its value. */
export function entry(line, value, at) {
  const sample = svg("svg", { width: 18, height: 8, "aria-hidden": "true" }, svg("line", { class: `line ${line.colour} ${line.dash}`, x1: 0, x2: 18, y1: 4, y2: 4 }));
  return el("span", { class: "entry" }, sample, line.label ? el("span", { class: "name" }, line.label) : null, " ", el("b", {}, value), " ", el("span", { class: "quiet" }, at), " ");
}
