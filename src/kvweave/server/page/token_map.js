// The text of a prompt, each token coloured by where its KV came from and, where there is a score, as strongly as it is high.
// Fast for long prompts: one listener for all tokens, built in slices, and the browser lays out only what is in view.

import { freshId, h } from "./dom.js";
import { count } from "./format.js";

const SLICE_TOKENS = 4000; // built per frame
const BLOCK_TOKENS = 300; // laid out together: a block ends at the first line end after so many,
const LONGEST_BLOCK_TOKENS = 900; // or in the middle of a line
const STEPS = 5;

/** Return the map. `groups` cut the tokens into the prompt's spans. */
export function tokenMap(tokens, groups) {
  const steps = heatSteps(tokens);
  const said = h("p", { class: "visually-hidden", role: "status" });
  const tip = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const help = freshId("help");
  const map = h("div", {
    class: "tokens",
    tabindex: 0,
    role: "application",
    "aria-label": `Tokens of the prompt, ${count(tokens.length)}`,
    "aria-describedby": help,
  });
  const elements = new Array(tokens.length);
  let active = null;
  let byKey = false; // until the pointer moves: when a key scrolls the map, other tokens come under a resting pointer
  build(map, tokens, groups, steps, elements);

  function point(index, speak) {
    if (active !== null) elements[active]?.classList.remove("active");
    active = index;
    const element = index === null ? undefined : elements[index];
    tip.hidden = element === undefined;
    if (element === undefined) return;
    element.classList.add("active");
    tip.replaceChildren(...describe(tokens[index], index, tokens.length, steps.rank(index)));
    if (speak) said.textContent = spoken(tokens[index], index);
    place(tip, element, map);
  }

  function move(to) {
    const index = Math.max(0, Math.min(tokens.length - 1, to));
    elements[index]?.scrollIntoView({ block: "nearest" });
    point(index, true);
  }

  map.addEventListener("pointerover", (event) => byKey || point(indexOf(event.target), false));
  map.addEventListener("pointermove", (event) => {
    if (!byKey || (event.movementX === 0 && event.movementY === 0)) return;
    byKey = false;
    point(indexOf(event.target), false);
  });
  map.addEventListener("pointerleave", () => byKey || point(null, false));
  map.addEventListener("focus", () => map.matches(":focus-visible") && move(active ?? 0));
  map.addEventListener("blur", () => point(null, false));
  map.addEventListener(
    "scroll",
    () => active !== null && elements[active] && place(tip, elements[active], map),
  );
  map.addEventListener("keydown", (event) => {
    const jump = jumps(tokens, active ?? 0)[event.key];
    if (jump === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    byKey = true;
    move(jump());
  });
  return h(
    "div",
    { class: "token-frame" },
    map,
    tip,
    said,
    h(
      "p",
      { class: "map-help", id: help },
      "Point at a token, or use ",
      h("kbd", {}, "←"),
      " ",
      h("kbd", {}, "→"),
      " in the map; ",
      h("kbd", {}, "↑"),
      " ",
      h("kbd", {}, "↓"),
      " go to the next run of another origin.",
      steps.scored && " The stronger a colour, the higher the score.",
    ),
  );
}

/** Where each key leads from a token. */
function jumps(tokens, at) {
  const otherRun = (step) => () => {
    let index = at;
    while (tokens[index + step] && tokens[index].origin === tokens[at].origin) index += step;
    return index;
  };
  return {
    ArrowRight: () => at + 1,
    ArrowLeft: () => at - 1,
    ArrowDown: otherRun(1),
    ArrowUp: otherRun(-1),
    PageDown: () => at + 50,
    PageUp: () => at - 50,
    Home: () => 0,
    End: () => tokens.length - 1,
  };
}

function build(map, tokens, groups, steps, elements) {
  const blocks = groups.flatMap((group) => {
    const text = h("div", { class: "token-text" });
    map.append(
      h(
        "div",
        { class: "token-group" },
        h("p", { class: "token-head" }, h("strong", {}, group.label), h("span", {}, group.detail)),
        text,
      ),
    );
    return blocksOf(tokens, group).map(([start, end]) => ({ text, start, end }));
  });
  const slice = () => {
    for (let built = 0; built < SLICE_TOKENS && blocks.length > 0;) {
      const { text, start, end } = blocks.shift();
      const block = h("div", { class: "token-block" });
      for (let index = start; index < end; index += 1)
        block.append((elements[index] = token(tokens[index], index, steps.of(index))));
      text.append(block);
      built += end - start;
    }
    if (blocks.length > 0) requestAnimationFrame(slice);
  };
  slice();
}

/** Return where the blocks of a group begin and end. */
function blocksOf(tokens, { start: first, end: last }) {
  const blocks = [];
  let start = first;
  for (let end = first + 1; end <= last; end += 1) {
    const length = end - start;
    const cut =
      length >= LONGEST_BLOCK_TOKENS || (length >= BLOCK_TOKENS && tokens[end - 1].text.endsWith("\n"));
    if (!cut && end < last) continue;
    blocks.push([start, end]);
    start = end;
  }
  return blocks;
}

function token({ text, origin }, index, step) {
  const element = document.createElement("span");
  element.className = step ? `token o-${origin} heat-${step}` : `token o-${origin}`;
  element.dataset.index = index;
  element.textContent = text;
  return element;
}

function indexOf(element) {
  const index = element.dataset?.index;
  return index === undefined ? null : Number(index);
}

/** Divide the scored tokens into five steps of equal size: scores of different methods have different scales. */
function heatSteps(tokens) {
  const scored = [];
  tokens.forEach(({ score }, index) => typeof score === "number" && scored.push(index));
  scored.sort((a, b) => tokens[a].score - tokens[b].score);
  const ranks = new Map(scored.map((index, rank) => [index, (rank + 1) / scored.length]));
  return {
    scored: scored.length > 0,
    of: (index) => (ranks.has(index) ? Math.max(1, Math.ceil(ranks.get(index) * STEPS)) : 0),
    rank: (index) => ranks.get(index),
  };
}

function describe({ text, origin, score }, index, total, rank) {
  return [
    h("code", { class: "tip-text" }, visible(text)),
    h("span", { class: "tip-origin" }, h("span", { class: `swatch fill-${origin}` }), origin),
    typeof score === "number" &&
      h(
        "span",
        { class: "tip-score" },
        `score ${number(score)}`,
        h("span", { class: "muted" }, ` higher than ${Math.round((rank ?? 0) * 100)} %`),
      ),
    h("span", { class: "muted" }, `token ${count(index + 1)} of ${count(total)}`),
  ].filter(Boolean);
}

function spoken({ text, origin, score }, index) {
  const scored = typeof score === "number" ? `, score ${number(score)}` : "";
  return `${text.trim() || visible(text)}, ${origin}${scored}, token ${index + 1}`;
}

const number = (score) =>
  Math.abs(score) >= 0.01 || score === 0 ? score.toFixed(3) : score.toExponential(1);

/** Show spaces and line ends, which have no look of their own. */
const visible = (text) =>
  text === ""
    ? "(part of a character)"
    : text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·");

function place(tip, element, map) {
  const [at] = element.getClientRects();
  const frame = map.getBoundingClientRect();
  if (!at || at.bottom < frame.top || at.top > frame.bottom) {
    tip.hidden = true;
    return;
  }
  tip.hidden = false;
  const width = tip.offsetWidth;
  const left = Math.max(0, Math.min(at.left - frame.left, frame.width - width));
  const above = at.top - frame.top - tip.offsetHeight - 8;
  const top = above + frame.top > 64 ? above : at.bottom - frame.top + 8; // below, where the page's head is in the way
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}
