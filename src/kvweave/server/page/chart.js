// A line chart of hit rates, drawn as SVG; the same figures as a table for those who do not see it.

import { h, s } from "./dom.js";
import { share } from "./format.js";

const HEIGHT = 200; // pixels, as in the style sheet
const LEFT = 48;
const RIGHT = 6;
const TOP = 10;
const BOTTOM = 28;
const SERIES = [
  ["kv", "Prompt not computed", "line-kv"],
  ["answers", "Answered from the cache", "line-answers"],
];

/** Return the chart, or `empty`. `history`: `{at_s, kv, answers}`, rates 0..1 or null for no rate, oldest first. */
export function lineChart(history, empty) {
  if (history.length < 2) return h("p", { class: "muted" }, empty);
  const reading = h("p", { class: "chart-reading muted" }, latestText(history));
  const drawing = s("svg", {
    class: "chart",
    role: "img",
    "aria-label": `Hit rates over time. ${latestText(history)}`,
  });
  let scale = null;
  const draw = (width) => {
    scale = scaleOf(history, width);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    drawing.replaceChildren(...picture(history, scale));
  };
  draw(640);
  new ResizeObserver(([{ contentRect }]) => contentRect.width > 0 && draw(contentRect.width)).observe(
    drawing,
  );
  drawing.addEventListener("pointermove", (event) => {
    const at = event.clientX - drawing.getBoundingClientRect().left;
    const nearest = history.reduce((best, one) =>
      Math.abs(scale.x(one) - at) < Math.abs(scale.x(best) - at) ? one : best,
    );
    const cursor = drawing.querySelector(".cursor");
    cursor.setAttribute("transform", `translate(${scale.x(nearest)} 0)`);
    cursor.setAttribute("visibility", "visible");
    reading.textContent = `${clock(nearest)}: ${ratesText((field) => nearest[field])}.`;
  });
  drawing.addEventListener("pointerleave", () => {
    drawing.querySelector(".cursor").setAttribute("visibility", "hidden");
    reading.textContent = latestText(history);
  });
  return h("div", {}, key(), drawing, reading, table(history));
}

/** Return what turns times and rates into places of a drawing of this width. */
function scaleOf(history, width) {
  const from = history[0].at_s;
  const span = history.at(-1).at_s - from || 1;
  return {
    right: width - RIGHT,
    x: ({ at_s }) => LEFT + ((at_s - from) / span) * (width - LEFT - RIGHT),
    y: (rate) => TOP + (1 - rate) * (HEIGHT - TOP - BOTTOM),
  };
}

function picture(history, scale) {
  return [
    ...[0, 0.5, 1].flatMap((rate) => grid(rate, scale)),
    ...SERIES.flatMap(([field, , style]) => paths(history, field, style, scale)),
    s("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }),
    timeLabel(history[0], LEFT, "start"),
    timeLabel(history.at(-1), scale.right, "end"),
  ];
}

function grid(rate, { right, y }) {
  return [
    s("line", { class: "grid", x1: LEFT, x2: right, y1: y(rate), y2: y(rate) }),
    s("text", { class: "axis", x: LEFT - 10, y: y(rate) + 4, "text-anchor": "end" }, share(rate)),
  ];
}

function paths(history, field, style, { x, y }) {
  const parts = [[]];
  for (const point of history) {
    if (typeof point[field] === "number")
      parts.at(-1).push(`${x(point).toFixed(1)} ${y(point[field]).toFixed(1)}`);
    else parts.push([]);
  }
  return parts
    .filter((points) => points.length > 0)
    .map((points) =>
      s("path", { class: style, d: points.length > 1 ? `M${points.join("L")}` : `M${points[0]}h.01` }),
    );
}

function key() {
  return h(
    "ul",
    { class: "chart-key" },
    SERIES.map(([, name, style]) =>
      h(
        "li",
        {},
        s(
          "svg",
          { viewBox: "0 0 24 8", class: "key-line", "aria-hidden": "true" },
          s("path", { d: "M1 4H23", class: style }),
        ),
        name,
      ),
    ),
  );
}

const clock = ({ at_s }) => new Date(at_s * 1000).toLocaleTimeString("en-GB");

const timeLabel = (point, at, anchor) =>
  s("text", { class: "axis", x: at, y: HEIGHT - 8, "text-anchor": anchor }, clock(point));

const rateText = (rate) => (typeof rate === "number" ? share(rate) : "none");

const ratesText = (of) => SERIES.map(([field, name]) => `${name} ${rateText(of(field))}`).join(", ");

const latestText = (history) =>
  `Over the last ten questions at most: ${ratesText((field) => history.findLast((point) => typeof point[field] === "number")?.[field])}.`;

function table(history) {
  const head = ["Time", ...SERIES.map(([, name]) => name)];
  return h(
    "details",
    { class: "as-table" },
    h("summary", {}, "As a table"),
    h(
      "table",
      { class: "table" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((text) => h("th", { scope: "col" }, text)),
        ),
      ),
      h(
        "tbody",
        {},
        history.map((point) =>
          h(
            "tr",
            {},
            h("th", { scope: "row" }, clock(point)),
            SERIES.map(([field]) => h("td", {}, rateText(point[field]))),
          ),
        ),
      ),
    ),
  );
}
