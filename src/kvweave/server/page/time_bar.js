// Where a request's time went, against what full prefill would have taken.

import { h } from "./dom.js";
import { seconds, times } from "./format.js";

/** Stages of a request in order: field of the timing, name, what it does, which group it is drawn as. */
const STAGES = [
  ["retrieve_s", "Retrieve", "find passages", "find"],
  ["tokenize_s", "Tokenize", "text to tokens", "find-2"],
  ["judge_s", "Judge", "whether a stored question asks the same", "reuse"],
  ["match_s", "Match", "look up and load stored KV", "reuse"],
  ["place_s", "Place", "verify and rotate it", "reuse-2"],
  ["select_s", "Select", "choose tokens to recompute", "reuse-3"],
  ["recompute_s", "Recompute", "run them through the model", "compute"],
  ["decode_s", "Decode", "write the answer", "decode"],
];

/** Return the section. `fullPrefill_s` is the server's estimate, or nothing if it has none. */
export function timeBar(timing, fullPrefill_s, cached) {
  if (cached) return cachedTime(timing);
  const parts = STAGES.map(([field, name, what, group]) => ({ name, what, group, s: timing[field] ?? 0 }));
  const finding = parts.slice(0, 2);
  const decode = parts.at(-1);
  const full = fullPrefill_s > 0 ? { name: "Full prefill", group: "full", s: fullPrefill_s } : null;
  const fullParts = full && [...finding, full, decode];
  const total = (list) => list.reduce((sum, { s }) => sum + s, 0);
  const longest = Math.max(total(parts), fullParts ? total(fullParts) : 0) || 1;
  const first_s = timing.ttft_s || total(parts.slice(0, -1));
  const fullFirst_s = full && total(finding) + full.s;
  return h(
    "section",
    { class: "panel time", "aria-label": "Time" },
    h("h2", {}, "Where the time went"),
    h("p", { class: "lead" }, ...sentence(first_s, fullFirst_s)),
    row("With reuse", parts, longest, first_s),
    fullParts && row("Full prefill", fullParts, longest, fullFirst_s, "estimate"),
    h("ul", { class: "stages" }, [...parts, full].filter(Boolean).map(stage)),
  );
}

function cachedTime(timing) {
  return h(
    "section",
    { class: "panel time", "aria-label": "Time" },
    h("h2", {}, "Where the time went"),
    h(
      "p",
      { class: "lead" },
      "The stored answer came after ",
      h("strong", {}, seconds(timing.total_s || timing.ttft_s || 0)),
      ". There was no prompt to read.",
    ),
  );
}

function sentence(first_s, fullFirst_s) {
  const first = ["First token after ", h("strong", {}, seconds(first_s))];
  if (!fullFirst_s) return [...first, "."];
  const rest = [". Full prefill would have taken about ", h("strong", {}, seconds(fullFirst_s))];
  const ratio = fullFirst_s / first_s;
  if (ratio >= 1.05) return [...first, ...rest, `, ${times(ratio)} as long.`];
  return [...first, ...rest, "; for this prompt, reuse saved nothing."];
}

function row(name, parts, longest, first_s, kind = "") {
  const bar = h("div", { class: "time-bar", "aria-hidden": "true" });
  for (const { group, s, name: stageName } of parts) {
    if (s <= 0) continue;
    const segment = h("span", { class: `segment t-${group}`, title: `${stageName}: ${seconds(s)}` });
    segment.style.width = `${(s / longest) * 100}%`;
    bar.append(segment);
  }
  return h(
    "div",
    { class: "time-row" },
    h("p", { class: "time-name" }, name, kind && h("span", { class: "muted" }, ` (${kind})`)),
    h("p", { class: "time-first" }, seconds(first_s), h("span", { class: "muted" }, " to the first token")),
    bar,
  );
}

function stage({ name, what, group, s }) {
  return h(
    "li",
    {},
    h("span", { class: `swatch t-${group}`, "aria-hidden": "true" }),
    h(
      "span",
      { class: "stage-name" },
      name,
      h("span", { class: "stage-what" }, what ?? "estimated for this prompt"),
    ),
    h("span", { class: "number" }, seconds(s)),
  );
}
