// Numbers and texts as a person reads them.
import { el } from "./dom.js";

/** A number in at most `digits` significant digits. */
export function num(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(Math.min(3, digits))).toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${num(100 * value, 3)} %`;
}

// Control characters, marks that turn the direction of text, invisible ones and tags: shown, not obeyed.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff" +
    "\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]",
  "gu",
);

function codeName(character) {
  const code = character.codePointAt(0);
  return code < 32 ? String.fromCodePoint(0x2400 + code) : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Nodes that show `text` as it is, with what cannot be seen named in a box. */
export function shown(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    nodes.push(text.slice(from, match.index), el("span", { class: "hidden-char" }, codeName(match[0])));
    from = match.index + match[0].length;
  }
  return [...nodes, text.slice(from)].filter((node) => node !== "");
}

/** The same as a plain string, for titles and one-line excerpts. */
export function plain(text) {
  return text.replace(HIDDEN, (character) => codeName(character)).replace(/\s+/g, " ");
}

/** The end of a text on one line. */
export function tail(text, length) {
  const points = Array.from(plain(text.slice(-4 * length)));
  return points.length <= length ? points.join("") : `…${points.slice(1 - length).join("")}`;
}

/** The beginning of a text on one line. */
export function head(text, length) {
  const points = Array.from(plain(text.slice(0, 4 * length)));
  return points.length <= length ? points.join("") : `${points.slice(0, length - 1).join("")}…`;
}
