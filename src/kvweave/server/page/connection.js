// Say plainly whether the server answers, and look for it again when it does not.

import { announce, h, icon } from "./dom.js";

/** How long to wait before the server is asked again, by state; 0 for never. */
const WAITS_MS = { ready: 0, loading: 1000, draining: 1000, failed: 3000, lost: 3000 };

let state = "unknown"; // or a state of WAITS_MS
let reason = ""; // why the server could not load the model
let timer = null;
const listeners = new Set();

/** Call `listener` each time that the server answers again after a break. */
export function onReturn(listener) {
  listeners.add(listener);
}

export function connectionLost() {
  if (state !== "lost") enter("lost");
}

export function connectionWorks() {
  if (state === "lost" || state === "unknown") check();
}

/** Ask the server how it is; go on asking until it is ready. */
export async function check() {
  clearTimeout(timer);
  let next = "lost";
  try {
    const response = await fetch(new URL("health", document.baseURI), { cache: "no-store" });
    if (response.ok) next = "ready";
    else ({ status: next, reason } = await response.json());
  } catch {
    // no answer: lost
  }
  enter(next in WAITS_MS ? next : "loading");
}

function enter(next) {
  const before = state;
  state = next;
  clearTimeout(timer);
  if (WAITS_MS[next]) timer = setTimeout(check, WAITS_MS[next]);
  if (next === before) return;
  show();
  if (next !== "ready") return;
  if (before === "lost") announce("Connected again.");
  for (const listener of listeners) listener(before);
}

function show() {
  const notice = document.getElementById("notice");
  notice.replaceChildren();
  notice.hidden = state === "ready" || state === "unknown";
  notice.dataset.state = state;
  if (state === "lost") {
    notice.append(
      icon("warning"),
      h(
        "p",
        {},
        h("strong", {}, "No connection to the server."),
        " It may have stopped. This page tries again every few seconds.",
      ),
      h("button", { type: "button", class: "button", onclick: check }, "Try now"),
    );
  } else if (state === "failed") {
    notice.append(
      icon("warning"),
      h("p", {}, h("strong", {}, "The server could not load the model."), ` ${reason ?? ""}`),
    );
  } else if (state === "draining") {
    notice.append(
      h("span", { class: "spinner" }),
      h("p", {}, "The server is about to stop. It takes no new questions."),
    );
  } else if (state === "loading") {
    notice.append(
      h("span", { class: "spinner" }),
      h("p", {}, "The model is loading. Questions can be asked as soon as it is there."),
    );
  }
}
