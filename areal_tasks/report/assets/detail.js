// One sample, whole.
import { button, el } from "./dom.js";
import { KINDS, when } from "./data.js";
import { num, percent, shown } from "./format.js";
import { tokensView } from "./tokens.js";

/** Everything about a sample; `only(prompt)` shows what else was said to its prompt. */
export function detailView(sample, { many, only, step }) {
  const steps = el("div", { class: "steps" }, button("‹ previous", () => step(-1), { class: "small" }), button("next ›", () => step(1), { class: "small" }));
  const title = [many ? sample.run.name : "", KINDS[sample.table], when(sample), `sample ${sample.id}`].filter((part) => part).join(" · ");
  return [
    el("header", {}, el("h3", {}, title), steps),
    el("div", { class: "numbers" }, pairsOf(sample)),
    block("Prompt", sample.prompt, button(`all of prompt ${sample.prompt_id}`, () => only(sample), { class: "small" })),
    block("Completion", sample.completion),
    block("Answer", sample.answer),
    block("Read as", sample.parsed),
    block("Verifier", sample.detail),
    el("div", { class: "block" }, el("h4", {}, "Tokens"), tokensView(sample)),
  ];
}

function pairsOf(sample) {
  const versions = sample.version_min === sample.version_max ? num(sample.version_min) : `${sample.version_min}–${sample.version_max}`;
  const pairs = [
    ["reward", sample.reward === undefined ? null : num(sample.reward)],
    ["verdict", sample.verdict],
    ["shaped reward", knownNumber(sample.shaped_reward)],
    ["generated", knownNumber(sample.num_generated)],
    ["tokens", knownNumber(sample.num_tokens)],
    ["ended by", sample.truncated ? `${sample.stop_reason} (truncated)` : sample.stop_reason],
    ["turns", sample.turns > 1 ? num(sample.turns) : null],
    ["weights", sample.version_min === undefined ? null : `version ${versions}`],
    ["left out", sample.dropped ? sample.dropped_reason || "yes" : null],
    ["ratio", knownNumber(sample.sample_ratio)],
    ["clipped", sample.sample_clip_fraction === undefined || sample.sample_clip_fraction === null ? null : percent(sample.sample_clip_fraction)],
    ["KL", knownNumber(sample.sample_kl)],
    ["loss", knownNumber(sample.sample_loss)],
    ["train–inference mismatch", knownNumber(sample.sample_logprob_gap)],
    ["group", sample.group_id === undefined ? null : String(sample.group_id)],
    ["epoch", sample.epoch === undefined ? null : String(sample.epoch)],
    ["server", sample.server],
    ["seconds", knownNumber(sample.seconds)],
    ["chosen as", sample.why.join(", ")],
  ];
  return pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => el("span", { class: "pair" }, el("span", { class: "quiet" }, `${name} `), el("b", {}, shown(String(value)))));
}

function knownNumber(value) {
  return value === undefined || value === null ? null : num(value);
}

function block(title, text, more = null) {
  if (text === undefined && title !== "Completion") return null;
  const body = text ? shown(text) : el("span", { class: "quiet" }, "(empty)");
  return el("div", { class: "block" }, el("h4", {}, title, more), el("pre", { dir: "auto", class: "text" }, body));
}
