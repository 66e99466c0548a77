// The tokens of a sample in colours, and what is known of the one under the pointer or the arrow keys.
import { button, el } from "./dom.js";
import { num, percent, shown } from "./format.js";
import { tokensOf } from "./data.js";

const STEPS = 8; // shades of a colour
const CERTAIN = -4; // a logprob at or below this has the full colour

const MODES = {
  lp: { name: "Logprob", about: "how unlikely the policy found each token", shade: (token) => ["low", token.lp / CERTAIN] },
  adv: { name: "Advantage", about: "green is made likelier, red less likely", shade: (token, range) => [token.adv > 0 ? "good" : "bad", Math.abs(token.adv) / range.adv] },
  ver: { name: "Version", about: "which weights made each token", shade: (token, range) => [`v${range.versions.indexOf(token.ver) % 6}`, 0.6] },
};

let mode = "lp"; // stays as it was chosen from sample to sample

/** The coloured tokens of a sample, with the selector of what colours them. */
export function tokensView(sample) {
  const tokens = tokensOf(sample);
  const own = tokens.filter((token) => token.own);
  const modes = Object.keys(MODES).filter((name) => own.some((token) => token[name] !== undefined && token[name] !== null));
  const strip = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens; arrow keys move" });
  const legend = el("p", { class: "legend" });
  const spans = tokens.map((token, i) => tokenSpan(token, i));
  strip.append(...spans.flatMap((span, i) => [tokens[i].cutBefore ? gap(sample) : null, span, lineBreak(tokens[i])]).filter((node) => node !== null));
  const paint = () => colour(tokens, spans, legend, modes.includes(mode) ? mode : modes[0]);
  paint();
  point(strip, spans, tokens);
  return el("div", {}, modes.length ? chooser(modes, paint) : null, legend, strip, el("p", { class: "reading", "aria-live": "polite" }));
}

function chooser(modes, paint) {
  const chosen = modes.includes(mode) ? mode : modes[0];
  const made = modes.map((name) => button(MODES[name].name, () => {
    mode = name;
    made.forEach((other, i) => other.setAttribute("aria-pressed", String(modes[i] === name)));
    paint();
  }, { class: "small", "aria-pressed": String(name === chosen), "data-mode": name }));
  return el("div", { class: "modes", role: "group", "aria-label": "Colour tokens by" }, el("span", { class: "quiet" }, "Colour by"), made);
}

function tokenSpan(token, i) {
  const text = token.text === undefined ? `${token.id} ` : token.text;
  const visible = text === "" ? [el("span", { class: "hidden-char" }, "∅")] : shown(text.replace(/\n/g, "⏎").replace(/\t/g, "⇥"));
  return el("span", { class: token.own ? "token own" : "token", "data-i": i }, visible);
}

function lineBreak(token) {
  return token.text !== undefined && token.text.includes("\n") ? el("br") : null;
}

function gap(sample) {
  return el("p", { class: "quiet" }, `… ${sample.tokens.cut[1]} tokens left out …`);
}

function colour(tokens, spans, legend, name) {
  const own = tokens.filter((token) => token.own);
  const range = { adv: Math.max(1e-9, ...own.map((token) => Math.abs(token.adv || 0))), versions: [...new Set(own.map((token) => token.ver))].sort((a, b) => a - b) };
  spans.forEach((span, i) => {
    if (!tokens[i].own) return;
    const value = name === undefined ? null : tokens[i][name];
    span.className = `token own ${value === null || value === undefined ? "" : shadeClass(MODES[name].shade(tokens[i], range))}`;
  });
  legend.replaceChildren(...legendOf(name, own, range));
}

function shadeClass([hue, share]) {
  const step = Math.round(Math.min(1, Math.max(0, share)) * STEPS);
  return step ? `${hue} s${step}` : "";
}

function legendOf(name, own, range) {
  if (!own.length) return ["No token of this sample was generated."];
  if (name === undefined) return ["Dim tokens are the prompt's."];
  const keys = { lp: [["low", 0, "0"], ["low", 0.5, num(CERTAIN / 2)], ["low", 1, `${CERTAIN} or less`]], adv: [["bad", 1, `−${num(range.adv, 3)}`], ["bad", 0, "0"], ["good", 1, `+${num(range.adv, 3)}`]] };
  const versions = range.versions.slice(0, 12).map((version, i) => [`v${i % 6}`, 0.6, String(version)]);
  const swatches = (keys[name] || versions).map(([hue, share, text]) => el("span", { class: `token own key ${shadeClass([hue, share])}` }, text));
  return [`${MODES[name].name}: ${MODES[name].about}. `, ...swatches];
}

// ── pointing ────────────────────────────────────────────────────────────────────────────────────────────────────────

function point(strip, spans, tokens) {
  let current = -1;
  const go = (i) => {
    spans[current]?.classList.remove("current");
    current = i;
    spans[i]?.classList.add("current");
    if (i >= 0) tell(spans[i], tokens[i]);
    else hideTip();
  };
  const under = (event) => Number(event.target.closest("[data-i]")?.dataset.i ?? -1);
  strip.addEventListener("pointerover", (event) => go(under(event)));
  strip.addEventListener("pointerdown", (event) => go(under(event)));
  strip.addEventListener("pointerleave", () => go(-1));
  strip.addEventListener("blur", () => go(-1));
  strip.addEventListener("keydown", (event) => {
    const first = tokens.findIndex((token) => token.own);
    const moves = { ArrowRight: current < 0 ? Math.max(0, first) : current + 1, ArrowLeft: current - 1, Home: 0, End: tokens.length - 1, Escape: -1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    go(Math.min(tokens.length - 1, Math.max(event.key === "Escape" ? -1 : 0, moves[event.key])));
    strip.parentElement.querySelector(".reading").textContent = current < 0 ? "" : rowsOf(tokens[current]).map((row) => row.join(" ")).join(", ");
  });
}

function rowsOf(token) {
  const rows = [["token", JSON.stringify(token.text ?? "")], ["id", String(token.id)], ["position", String(token.position)]];
  const known = { lp: "logprob", adv: "advantage", ver: "version", ref: "reference logprob", prox: "proximal logprob" };
  for (const [name, title] of Object.entries(known)) {
    if (token[name] !== undefined && token[name] !== null) rows.push([title, num(token[name], 5) + (name === "lp" ? ` (${percent(Math.exp(token.lp))})` : "")]);
  }
  return token.own ? rows : [...rows, ["", "prompt: not generated"]];
}

function tell(span, token) {
  const tip = document.getElementById("tip");
  tip.replaceChildren(...rowsOf(token).map(([name, value]) => el("div", {}, name ? el("span", { class: "quiet" }, `${name} `) : null, shown(value))));
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const above = box.top - height - 6;
  tip.style.left = `${Math.max(4, Math.min(box.left, window.innerWidth - width - 4))}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
}

export function hideTip() {
  document.getElementById("tip").hidden = true;
}
