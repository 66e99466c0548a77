// Elements. Text goes in as text only: nothing here reads markup from a string.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; children are elements or texts, `on…` attributes are listeners. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A button that does not submit. */
export function button(text, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, text);
}

/** A labelled control. */
export function labelled(text, control) {
  return el("label", { class: "field" }, el("span", {}, text), control);
}

/** A select of [value, text] pairs. */
export function select(options, onchange, attributes = {}) {
  const made = options.map(([value, text]) => el("option", { value }, text));
  return el("select", { onchange, ...attributes }, made);
}

/** Names and values as a list. */
export function facts(rows, cell = (text) => text) {
  return el("dl", {}, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, cell(value))]));
}

/** A table whose first row names the columns, in a box of its own that scrolls sideways. */
export function table(rows, cell = (text) => text) {
  const [names, ...body] = rows;
  const head = el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)));
  const lines = body.map((row) => el("tr", {}, row.map((value) => el("td", {}, cell(value)))));
  return el("div", { class: "scroll", tabindex: 0 }, el("table", {}, el("thead", {}, head), el("tbody", {}, lines)));
}
