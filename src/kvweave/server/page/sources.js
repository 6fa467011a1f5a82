// The sources of an answer; one opens with its passage marked in the document.

import { call, inKb } from "./api.js";
import { openDialog } from "./dialogs.js";
import { h, icon } from "./dom.js";
import { baseName, count } from "./format.js";

const CONTEXT_CHARACTERS = 20_000; // shown before and after the passage; the rest of a long document is left out

/** Return the heading and the list. The answer's own words are marked in the excerpts. */
export function sourcesList(sources, answer, kb) {
  if (sources.length === 0) return [];
  return [
    h("h2", { class: "side-title" }, "Sources", h("span", { class: "tally" }, count(sources.length))),
    h(
      "ol",
      { class: "source-list" },
      sources.map((source, index) => h("li", {}, card(source, index, answer, kb))),
    ),
  ];
}

function card(source, index, answer, kb) {
  return h(
    "button",
    { type: "button", class: "source", onclick: () => openSource(source, index, answer, kb) },
    h("span", { class: "source-number", "aria-hidden": "true" }, String(index + 1)),
    h("span", { class: "source-name", title: source.document }, source.title || baseName(source.document)),
    h("span", { class: "source-excerpt" }, marked(excerpt(source.text, answer), answer)),
  );
}

/** Return the part of a passage around the answer's words, else its beginning. */
function excerpt(text, answer) {
  const found = firstMatch(text, answer);
  if (found === null || found.start < 120) return text.slice(0, 400);
  const start = text.lastIndexOf(" ", found.start - 60) + 1;
  return `… ${text.slice(start, start + 400)}`;
}

/** Return the text with each place where the answer stands word by word in `<mark>`. */
function marked(text, answer) {
  const parts = [];
  let rest = text;
  for (let found = firstMatch(rest, answer); found !== null; found = firstMatch(rest, answer)) {
    parts.push(rest.slice(0, found.start), h("mark", {}, rest.slice(found.start, found.end)));
    rest = rest.slice(found.end);
  }
  return [...parts, rest];
}

function firstMatch(text, answer) {
  const starts = needles(answer)
    .map((words) => ({ words, start: findWords(text, words) }))
    .filter(({ start }) => start >= 0);
  if (starts.length === 0) return null;
  const { words, start } = starts.reduce((first, other) => (other.start < first.start ? other : first));
  return { start, end: start + words.length };
}

/** The whole answer if it is short, and its parts between commas: an answer that lists things stands nowhere as a whole. */
function needles(answer) {
  const whole = answer.trim().replace(/[.!?]+$/, "");
  if (whole.length > 200) return [];
  const parts = whole.split(/,\s+|\s+and\s+/).map((part) => part.trim());
  return [whole, ...parts].filter((part) => part.length > 2);
}

/** Return where the words stand in the text, not within another word, or -1. */
function findWords(text, words) {
  const [within, sought] = [text.toLowerCase(), words.toLowerCase()];
  const isWord = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);
  if (within.length !== text.length) return text.indexOf(words); // lower case has another length in this language
  for (let at = within.indexOf(sought); at >= 0; at = within.indexOf(sought, at + 1)) {
    if (!isWord(within[at - 1]) && !isWord(within[at + sought.length])) return at;
  }
  return -1;
}

async function openSource(source, index, answer, kb) {
  const body = h("div", { class: "document", tabindex: 0, role: "group", "aria-label": "Document text" });
  const score = typeof source.score === "number" ? `, retrieval score ${source.score.toFixed(3)}` : "";
  const where = whereabouts(source);
  const place = h(
    "p",
    { class: "document-place" },
    where && `${where}; `,
    `${where ? "c" : "C"}haracters ${count(source.start)} to ${count(source.end)} of `,
    h("code", {}, source.document),
    score,
  );
  showPassage(body, { before: "", after: "" }, source, answer);
  const closed = openDialog(
    `${index + 1}. ${source.title || baseName(source.document)}`,
    () => [place, body],
    { wide: true },
  );
  const text = await documentText(kb, source.document);
  const own = text?.slice(source.start, source.end);
  if (own && source.text.endsWith(own)) { // before its own text, a chunk may repeat the header of its table or e-mail
    showPassage(body, { before: text.slice(0, source.start), after: text.slice(source.end) }, source, answer);
  }
  return closed;
}

/** Return where a person finds a source, such as "Page 3, Guide > Setup"; empty if the format has no such places. */
function whereabouts({ page, line, heading }) {
  return [page && `Page ${page}`, line && `Line ${line}`, heading].filter(Boolean).join(", ");
}

function showPassage(body, { before, after }, source, answer) {
  const passage = h(
    "div",
    { class: "passage", "aria-label": "Passage", role: "group" },
    marked(source.text, answer),
  );
  const cutBefore = before.length > CONTEXT_CHARACTERS;
  const cutAfter = after.length > CONTEXT_CHARACTERS;
  body.replaceChildren(
    h("div", { class: "around" }, cutBefore && "… ", before.slice(-CONTEXT_CHARACTERS)),
    passage,
    h("div", { class: "around" }, after.slice(0, CONTEXT_CHARACTERS), cutAfter && " …"),
  );
  requestAnimationFrame(() => {
    body.scrollTop = passage.offsetTop - body.offsetTop - body.clientHeight / 4;
  });
}

/** Return the document's text, or null if the server does not hand it out: then the passage stands alone. */
async function documentText(kb, document) {
  try {
    const found = await call("GET", inKb(kb, `/documents?source=${encodeURIComponent(document)}`));
    return typeof found?.text === "string" ? found.text : null;
  } catch {
    return null;
  }
}
