// What became of every token of the prompt: counts, a strip of the whole prompt, and the text as a heat map.

import { call, inKb } from "./api.js";
import { failure, h, s } from "./dom.js";
import { baseName, count, plural, share } from "./format.js";
import { tokenMap } from "./token_map.js";

/** Origins in the order of the legend, with what they mean. */
export const ORIGINS = [
  ["exact", "Exact", "stored, and equal to full attention's"],
  ["reused", "Reused", "stored in another context, unchanged"],
  ["recomputed", "Recomputed", "stored, but computed again"],
  ["fresh", "Fresh", "not stored, computed now"],
];

/** Return the section. The tokens themselves are asked for when they are opened: for that the server explains the run. */
export function promptMap(plan, sources, request) {
  const counts = countsOf(plan);
  const total = Object.values(counts).reduce((sum, one) => sum + one, 0);
  if (total === 0) return h("div", { hidden: true });
  const body = h("div", { class: "map-body" });
  const button = h(
    "button",
    { type: "button", class: "button", "aria-expanded": "false", onclick: toggle },
    "Show the tokens",
  );
  let shown = false;

  async function toggle() {
    shown = !shown;
    button.setAttribute("aria-expanded", String(shown));
    button.textContent = shown ? "Hide the tokens" : "Show the tokens";
    body.hidden = !shown;
    if (!shown || body.childElementCount > 0) return;
    body.append(
      h(
        "p",
        { class: "stage" },
        h("span", { class: "spinner" }),
        h("span", {}, "Asking which token came from where"),
      ),
    );
    try {
      const { kb, ...rest } = request;
      const found = await call("POST", inKb(kb, "/explain"), { body: { ...rest, cache: "off" } });
      const same = ORIGINS.every(
        ([origin]) => found.tokens.filter((token) => token.origin === origin).length === counts[origin],
      );
      const spans = same ? plan.spans : (found.plan?.spans ?? []);
      body.replaceChildren(
        ...[
          !same && againNote(),
          strip(found.tokens),
          tokenMap(found.tokens, groupsOf(found.tokens, spans, sources)),
        ].filter(Boolean),
      );
    } catch (error) {
      body.replaceChildren(
        failure(error, () => {
          body.replaceChildren();
          shown = false;
          toggle();
        }),
      );
    }
  }

  return h(
    "section",
    { class: "panel prompt", "aria-label": "Prompt" },
    h("div", { class: "panel-head" }, h("h2", {}, "What the prompt was made of"), button),
    h("p", { class: "lead" }, ...sentence(counts, total, plan)),
    proportions(counts, total),
    h(
      "ul",
      { class: "legend" },
      ORIGINS.map(([origin, name, meaning]) => legendEntry(origin, name, meaning, counts[origin], total)),
    ),
    body,
  );
}

function countsOf(plan) {
  return Object.fromEntries(ORIGINS.map(([origin]) => [origin, plan[`${origin}_tokens`] ?? 0]));
}

function sentence(counts, total, plan) {
  const kept = counts.exact + counts.reused;
  const recipe = plan.recipe ? [", recipe ", h("code", {}, plan.recipe)] : [];
  return [
    h("strong", {}, share(kept / total)),
    ` of ${plural(total, "token")} did not have to be computed`,
    ...recipe,
    ".",
  ];
}

function proportions(counts, total) {
  const bar = h("div", { class: "proportions", "aria-hidden": "true" });
  for (const [origin] of ORIGINS) {
    if (counts[origin] === 0) continue;
    const part = h("span", { class: `fill-${origin}` });
    part.style.flexGrow = String(counts[origin] / total);
    bar.append(part);
  }
  return bar;
}

function legendEntry(origin, name, meaning, tokens, total) {
  return h(
    "li",
    {},
    h("span", { class: `swatch fill-${origin}`, "aria-hidden": "true" }),
    h("span", { class: "legend-name" }, name, h("span", { class: "legend-meaning" }, meaning)),
    h("span", { class: "number" }, count(tokens), h("span", { class: "muted" }, ` ${share(tokens / total)}`)),
  );
}

function againNote() {
  return h(
    "p",
    { class: "note" },
    "The prompt was run again for this map. More of it is stored since the answer, so the counts differ.",
  );
}

/** The whole prompt in one line: runs of tokens of one origin, as wide as they are long. */
function strip(tokens) {
  const drawing = s("svg", {
    class: "strip",
    viewBox: `0 0 ${tokens.length} 1`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  let start = 0;
  for (let end = 1; end <= tokens.length; end += 1) {
    if (end < tokens.length && tokens[end].origin === tokens[start].origin) continue;
    drawing.append(
      s("rect", { x: start, y: 0, width: end - start, height: 1, class: `run-${tokens[start].origin}` }),
    );
    start = end;
  }
  return drawing;
}

/** Cut the tokens at the prompt's spans: `{label, detail, start, end}` each. */
function groupsOf(tokens, spans, sources) {
  const whole = [{ label: "Prompt", detail: plural(tokens.length, "token"), start: 0, end: tokens.length }];
  if (spans.length === 0 || spans.at(-1).end !== tokens.length) return whole;
  return spans.map((span) => ({
    label: labelOf(span, sources),
    detail: detailOf(span),
    start: span.start,
    end: span.end,
  }));
}

function labelOf(span, sources) {
  if (span.kind === "system") return "Instructions";
  if (span.kind === "question") return "Question";
  const source = sources[span.chunk];
  return source
    ? `${span.chunk + 1}. ${source.title || baseName(source.document)}`
    : `Chunk ${span.chunk + 1}`;
}

function detailOf(span) {
  const recomputed = span.recomputed_tokens ? `, ${count(span.recomputed_tokens)} recomputed` : "";
  return `${plural(span.end - span.start, "token")}${recomputed}${span.reason ? ` · ${span.reason}` : ""}`;
}
