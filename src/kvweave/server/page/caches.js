// The caches of a knowledge base: sizes, hit rates over time, what idle work predicted and what of it was asked.

import { call, inKb } from "./api.js";
import { lineChart } from "./chart.js";
import { failure, h, icon } from "./dom.js";
import { bytes, count, plural, seconds, share } from "./format.js";

const EVERY_MS = 5000;
const WINDOW = 10; // questions that a point of the chart is about
const ORIGINS = { knowledge: "documents", history: "earlier questions" };
const TIERS = { device: "Model's device", host: "Memory", disk: "Disk", shared: "Shared" };

export function cachesView() {
  const select = h("select", {
    class: "quiet-select",
    "aria-label": "Knowledge base",
    hidden: true,
    onchange: () => refresh(),
  });
  const body = h("div", { class: "caches" }, h("p", { class: "loading" }, "Loading"));
  const element = h(
    "div",
    { class: "view" },
    h(
      "div",
      { class: "view-head view-head-line" },
      h(
        "div",
        {},
        h("h1", {}, "Caches"),
        h("p", { class: "view-text" }, "What is stored, and how often it was of use."),
      ),
      select,
    ),
    body,
  );
  let timer = null;
  let shown = "";

  async function refresh() {
    clearTimeout(timer);
    try {
      const { data } = await call("GET", "v1/kb");
      choose(data.map(({ name }) => name));
      if (!select.value)
        return body.replaceChildren(
          h(
            "div",
            { class: "empty" },
            h("p", { class: "empty-title" }, "Nothing is stored yet"),
            h("p", {}, "Caches belong to a knowledge base. ", h("a", { href: "#/kb" }, "Create one"), "."),
          ),
        );
      const found = await call("GET", inKb(select.value, "/caches"));
      // Each look finds another load of the machine: that alone is no reason to show all of it again.
      const now = JSON.stringify(found, (key, value) =>
        key === "reasons" ? value.length : key === "conditions" ? undefined : value,
      );
      if (now !== shown) show(found); // what is read or selected stays, unless it changed
      shown = now;
      if (element.isConnected) timer = setTimeout(refresh, EVERY_MS);
    } catch (error) {
      shown = "";
      body.replaceChildren(failure(error, refresh));
    }
    return undefined;
  }

  function show(found) {
    const open = body.querySelector("details")?.open ?? false;
    body.replaceChildren(...contents(found));
    const details = body.querySelector("details");
    if (details) details.open = open;
  }

  function choose(names) {
    const before = select.value || sessionStorage.getItem("kvweave-kb");
    if (
      select.options.length !== names.length ||
      names.some((name, index) => select.options[index].value !== name)
    ) {
      select.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
      if (names.includes(before)) select.value = before;
    }
    select.hidden = names.length === 0;
  }

  return { element, enter: refresh, refresh, leave: () => clearTimeout(timer) };
}

function contents(found) {
  const kv = found.kv ?? {};
  const looked = (kv.hits ?? 0) + (kv.misses ?? 0);
  return [
    h(
      "dl",
      { class: "figures" },
      figure("Stored KV", bytes(kv.bytes), `of ${bytes(kv.limit_bytes)}, ${entries(kv.entries)}`),
      figure(
        "Look-ups found",
        looked ? share(kv.hits / looked) : "–",
        looked ? `of ${count(looked)}` : "none yet",
      ),
      figure(
        "Answers given",
        count(found.answers?.given),
        `from ${plural(found.answers?.answered ?? 0, "stored answer")}`,
      ),
      figure("Predicted and asked", askedShare(found.predictions), predictedText(found.predictions)),
    ),
    panel("Hit rates over time", hitRates(found.recent ?? [])),
    h(
      "div",
      { class: "two" },
      panel("By tier", tiers(kv.by_tier ?? {})),
      panel("By kind", kinds(kv.by_kind ?? {})),
    ),
    predictions(found),
  ];
}

const panel = (title, ...content) =>
  h(
    "section",
    { class: "panel", "aria-label": title },
    h("h2", { class: "section-title" }, title),
    ...content,
  );

const entries = (number) => (number === 1 ? "1 entry" : `${count(number)} entries`);

/** The share of prompt tokens that stored KV saved, and of questions that stored answers answered, in the last few questions. */
function hitRates(recent) {
  const points = recent.map(({ at_s }, index) => {
    const last = recent.slice(Math.max(0, index + 1 - WINDOW), index + 1);
    const computed = last.filter(({ cache }) => cache !== "answer");
    const sum = (field) => computed.reduce((total, one) => total + one[field], 0);
    return {
      at_s,
      kv: sum("prompt_tokens") ? sum("cached_tokens") / sum("prompt_tokens") : null,
      answers: 1 - computed.length / last.length,
    };
  });
  return lineChart(points, "Rates appear here once two questions have been asked since the server started.");
}

const figure = (name, value, detail) =>
  h(
    "div",
    { class: "figure" },
    h("dt", {}, name),
    h("dd", { class: "figure-value" }, value),
    h("dd", { class: "figure-detail" }, detail),
  );

const predictedCount = (found) => Object.values(found?.predicted ?? {}).reduce((sum, one) => sum + one, 0);

function askedShare(found) {
  const all = predictedCount(found);
  return all ? share((found.served ?? 0) / all) : "–";
}

function predictedText(found) {
  const all = predictedCount(found);
  return all ? `${count(found.served)} of ${plural(all, "question")}` : "no predictions yet";
}

function tiers(found) {
  const rows = Object.entries(found);
  if (rows.length === 0) return h("p", { class: "muted" }, "Nothing stored.");
  return h(
    "ul",
    { class: "tiers" },
    rows.map(([name, tier]) => tierRow(name, tier)),
  );
}

function tierRow(name, { bytes: used, limit_bytes: limit, entries: stored, hits, waiting, state }) {
  const label = TIERS[name] ?? name;
  if (!limit || state === "none")
    return h("li", { class: "tier unused" }, h("p", {}, label), h("p", {}, "not used"));
  const facts = [plural(hits ?? 0, "hit"), entries(stored)];
  if (waiting) facts.push(`${count(waiting)} waiting`);
  if (state && state !== "of this process") facts.push(state);
  return h(
    "li",
    { class: "tier" },
    h("p", {}, label),
    h("p", { class: "number" }, `${bytes(used)} of ${bytes(limit)}`),
    h("meter", {
      class: "meter",
      min: 0,
      max: limit,
      value: used,
      "aria-label": `${label}, share of its limit`,
    }),
    h("p", { class: "tier-facts muted" }, facts.join(" · ")),
  );
}

function kinds(found) {
  const rows = Object.entries(found).sort(([, a], [, b]) => b.bytes - a.bytes);
  if (rows.length === 0) return h("p", { class: "muted" }, "Nothing stored.");
  const head = (text) => h("th", { scope: "col", class: "number" }, text);
  return h(
    "table",
    { class: "table" },
    h(
      "thead",
      {},
      h("tr", {}, h("th", { scope: "col" }, "Kind"), head("Entries"), head("Tokens"), head("Size")),
    ),
    h(
      "tbody",
      {},
      rows.map(([name, kind]) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, name),
          ...[count(kind.entries), count(kind.tokens), bytes(kind.bytes)].map((text) =>
            h("td", { class: "number" }, text),
          ),
        ),
      ),
    ),
  );
}

// What idle work did ------------------------------------------------------------------------------------------------

function predictions(found) {
  const questions = found.predicted_questions ?? [];
  const work = Object.values(found.background ?? {}).reduce((sum, kind) => sum + (kind.seconds ?? 0), 0);
  const reasons = Object.entries(found.predictions?.reasons ?? {}).map(
    ([reason, number]) => `${count(number)} ${reason}`,
  );
  const dropped = found.predictions?.dropped
    ? `; ${count(found.predictions.dropped)} dropped${reasons.length ? ` (${reasons.join(", ")})` : ""}`
    : "";
  const by = Object.entries(found.predictions?.predicted ?? {}).map(
    ([origin, number]) => `${count(number)} from ${ORIGINS[origin] ?? origin}`,
  );
  return panel(
    "Predicted while idle",
    h(
      "p",
      { class: "lead" },
      by.length ? `${by.join(", ")}${dropped}.` : "Idle work has predicted no questions yet.",
      work > 0 && ` Idle work took ${seconds(work)}.`,
    ),
    found.idle && h("p", { class: "lead" }, idleText(found.idle)),
    questions.length > 0 && h("ul", { class: "predicted" }, questions.map(predictedQuestion)),
  );
}

/** What idle work did today, what it was worth in all, and why it does nothing now. */
function idleText(idle) {
  const { spent_today: today, seconds_per_day: limit, worth_today: made, worth, reasons, predictions: of } = idle;
  const budget = limit === null ? "" : ` of ${seconds(limit)}`;
  const sentences = [
    `Today: ${seconds(today.seconds)}${budget} of work, ${plural(made.entries, "answer")}, ${bytes(made.kv_bytes)} of KV`,
    `in all ${plural(worth.hits, "prepared answer")} given, which saved ${seconds(worth.saved_s)} of waiting`,
  ];
  if (of.made)
    sentences.push(
      `${count(of.asked)} of ${plural(of.made, "predicted question")} asked, ${plural(of.served, "answer")} given from them, ` +
        `${count(of.rejected)} rejected`,
    );
  if (idle.promoted)
    sentences.push(
      `${plural(idle.promoted, "question")} promoted to a stored answer, given ${plural(idle.promoted_given, "time")}`,
    );
  return `${sentences.join("; ")}.${reasons.length ? ` It waits: ${reasons.join("; ")}.` : ""}`;
}

function predictedQuestion({ question, origin, dropped, given, asked }) {
  const use = given
    ? `answer given ${given === 1 ? "once" : `${count(given)} times`}`
    : asked
      ? "asked"
      : dropped
        ? `dropped: ${dropped}`
        : "not asked";
  return h(
    "li",
    {},
    h("span", { class: "predicted-mark" }, (given > 0 || asked) && icon("check")),
    h("span", { class: "predicted-text" }, question),
    h("span", { class: "predicted-state" }, `${use} · from ${ORIGINS[origin] ?? origin}`),
  );
}
