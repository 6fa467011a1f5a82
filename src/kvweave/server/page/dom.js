// Build elements. Text becomes text nodes: nothing in this page is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element. `properties`: attributes, `on…` listeners, booleans for attributes without a value. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Return an SVG element. */
export function s(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Return the icon of this name, drawn in index.html; decoration, so that a label must stand beside it. */
export function icon(name) {
  return s(
    "svg",
    { viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" },
    s("use", { href: `#icon-${name}` }),
  );
}

let identifiers = 0;

/** Return an id that no other element has. */
export function freshId(prefix) {
  identifiers += 1;
  return `${prefix}-${identifiers}`;
}

/** Say something to screen readers; an equal text is said again. */
export function announce(text) {
  const announcer = document.getElementById("announcer");
  announcer.textContent = "";
  setTimeout(() => {
    announcer.textContent = text;
  }, 60);
}

/** Return a line that says what went wrong, with a button that tries again if `retry` is given. */
export function failure(error, retry) {
  return h(
    "div",
    { class: "failure", role: "alert" },
    icon("warning"),
    h("p", {}, error.message),
    retry && h("button", { type: "button", class: "button", onclick: retry }, "Try again"),
  );
}
