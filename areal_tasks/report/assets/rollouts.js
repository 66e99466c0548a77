// The section of samples: filters, a list, and the one that is looked at.
import { button, el } from "./dom.js";
import { when } from "./data.js";
import { head, num, tail } from "./format.js";
import { detailView } from "./detail.js";
import { makeFilters } from "./filters.js";
import { hideTip } from "./tokens.js";
import { colourOf } from "./curves.js";

const PAGE = 100;

/** The section of samples; its `update` lists them again. Null without samples. */
export function rolloutsSection(data) {
  if (!data.samples.length) return null;
  const state = { data, listed: [], shown: PAGE, current: null };
  state.list = el("div", { class: "list", role: "group", "aria-label": "Samples; arrow keys move" });
  state.detail = el("article", { class: "detail", id: "detail", tabindex: -1 });
  state.count = el("p", { class: "quiet", id: "count", "aria-live": "polite" });
  state.filters = makeFilters(data, () => update(state));
  state.list.addEventListener("keydown", (event) => moveInList(state, event));
  const title = data.runs.some((run) => run.flow !== "sft") ? "Rollouts" : "Demonstrations";
  const node = el("section", { id: "rollouts" }, el("h2", {}, title), state.filters.form, el("div", { class: "bar" }, state.count, state.filters.reset), el("div", { class: "browse" }, state.list, state.detail));
  update(state);
  return { node, title, update: () => update(state), only: (iteration) => onlyIteration(state, iteration) };
}

/** Lists the samples of one iteration, and goes there. */
function onlyIteration(state, iteration) {
  const { from, to } = state.filters.fields;
  from.input.value = to.input.value = iteration;
  update(state);
  document.getElementById("rollouts").scrollIntoView({ block: "start" });
}

function update(state) {
  state.listed = state.filters.chosen(state.data.samples);
  state.shown = PAGE;
  const all = state.data.runs.reduce((sum, run) => sum + run.available, 0);
  state.count.textContent = `${state.listed.length} of the ${state.data.samples.length} samples in this page, which were chosen from ${all}.`;
  if (!state.listed.includes(state.current)) state.current = state.listed[0] ?? null;
  fillList(state);
  look(state, state.current, false);
}

function fillList(state) {
  const rows = state.listed.slice(0, state.shown).map((sample) => listRow(state, sample));
  const left = state.listed.length - rows.length;
  const more = left > 0 ? button(`${Math.min(left, PAGE)} more of ${left}`, () => showMore(state), { class: "more" }) : null;
  state.list.replaceChildren(...rows, ...(more ? [more] : []));
}

function showMore(state) {
  state.shown += PAGE;
  fillList(state);
  look(state, state.current, false);
}

function listRow(state, sample) {
  const many = state.data.runs.length > 1;
  const swatch = many ? el("span", { class: `swatch ${colourOf(sample.run.index)}`, title: sample.run.name }) : null;
  const badge = sample.table === "batch" ? null : el("span", { class: `badge ${tone(sample)}` }, num(sample.reward, 3));
  const facts = [when(sample), sample.verdict, `${sample.num_generated ?? sample.num_tokens} tokens`].filter((part) => part).join(" · ");
  const prompt = el("bdi", { class: "excerpt quiet" }, head(sample.prompt ?? "", 70));
  const completion = el("bdi", { class: "excerpt" }, tail(sample.completion || "(empty)", 90));
  const row = button("", () => look(state, sample, true), { class: "row" });
  row.append(...[swatch, badge].filter((part) => part), el("span", { class: "quiet facts-line" }, facts), prompt, completion);
  row.sample = sample;
  return row;
}

function tone(sample) {
  if (sample.reward === null || sample.reward === undefined) return "none";
  if (sample.verdict === "correct") return "good";
  return sample.verdict === "incorrect" ? "bad" : "none";
}

function look(state, sample, scroll) {
  hideTip();
  state.current = sample;
  for (const row of state.list.children) row.setAttribute("aria-current", String(row.sample !== undefined && row.sample === sample));
  if (!sample) return state.detail.replaceChildren(el("p", { class: "quiet" }, "No sample passes these filters."));
  const many = state.data.runs.length > 1;
  state.detail.replaceChildren(...detailView(sample, { many, only: (other) => onlyPrompt(state, other), step: (by) => step(state, by) }).filter((node) => node !== null));
  if (scroll && stacked(state)) state.detail.scrollIntoView({ block: "start" });
  return undefined;
}

/** Whether the detail lies below the list, as on a narrow screen. */
function stacked(state) {
  return state.detail.offsetTop > state.list.offsetTop + 40;
}

function step(state, by) {
  const next = state.listed[state.listed.indexOf(state.current) + by];
  if (!next) return;
  if (state.listed.indexOf(next) >= state.shown) showMore(state);
  look(state, next, false);
}

function moveInList(state, event) {
  const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  step(state, by);
  [...state.list.children].find((row) => row.sample === state.current)?.focus();
}

function onlyPrompt(state, sample) {
  state.filters.fields.prompt.input.value = sample.prompt_id;
  state.filters.fields.order.input.value = "prompt";
  update(state);
}
