// The view of questions: a question, its answer as it streams in, the sources, and what was computed for it.

import { ApiError, call, ConnectionLost, inKb, stream } from "./api.js";
import { composer } from "./composer.js";
import { announce, h, icon } from "./dom.js";
import { ago, count } from "./format.js";
import { promptMap } from "./prompt_map.js";
import { sourcesList } from "./sources.js";
import { timeBar } from "./time_bar.js";

/** Return the view; it is made once and keeps its answers while other views are shown. */
export function askView() {
  const results = h("div", { class: "results" });
  const view = h("div", { class: "view ask", "data-empty": "" });
  let running = null;

  const form = composer({
    ask(request) {
      running?.abort();
      running = new AbortController();
      view.removeAttribute("data-empty");
      const run = new Run(request, running, (again) => form.ask(again));
      results.replaceChildren(run.element);
      form.busy(true);
      run.start().finally(() => run.stopped(() => form.busy(false)));
    },
    stop: () => running?.abort(),
  });
  view.append(
    h(
      "div",
      { class: "hero" },
      h("h1", { class: "hero-title" }, "Ask your documents"),
      h("p", { class: "hero-text" }, "Answers with their sources, and little computed twice."),
      form.element,
    ),
    results,
  );
  return { element: view, keep: true, enter: form.enter, refresh: form.enter };
}

/** One question: its request and the part of the page that shows it. */
class Run {
  #request;
  #controller;
  #again;
  #text = "";

  constructor(request, controller, again) {
    this.#request = request;
    this.#controller = controller;
    this.#again = again;
    this.stage = h(
      "p",
      { class: "stage" },
      h("span", { class: "spinner" }),
      h("span", {}, "Looking for passages"),
    );
    this.meter = h("progress", { class: "meter", "aria-label": "Prompt tokens read", hidden: true });
    this.answer = h("div", { class: "answer-text", "aria-busy": "true" });
    this.note = h("div", { class: "answer-note" });
    this.side = h("aside", { class: "sources", "aria-label": "Sources" });
    this.below = h("div", { class: "insight" });
    this.element = h(
      "article",
      { class: "result" },
      h(
        "section",
        { class: "answer", "aria-label": "Answer" },
        h("h1", { class: "asked" }, request.question),
        this.stage,
        this.meter,
        this.answer,
        this.note,
      ),
      this.side,
      this.below,
    );
  }

  /** Call `after` unless a newer question has taken the place of this one. */
  stopped(after) {
    if (this.element.isConnected || !document.querySelector(".result")) after();
  }

  async start() {
    const { kb, ...body } = this.#request;
    announce("Looking for an answer.");
    try {
      let finished = false;
      for await (const { event, data } of stream(
        inKb(kb, "/ask"),
        { ...body, stream: true },
        this.#controller.signal,
      )) {
        if (event === "progress") this.#progress(data);
        else if (event === "piece") this.#piece(data.text);
        else if (event === "done") {
          finished = true;
          this.#done(data);
        }
      }
      if (!finished) throw new ConnectionLost("The connection to the server was lost.");
    } catch (error) {
      this.#failed(error);
    } finally {
      this.answer.removeAttribute("aria-busy");
      this.stage.remove();
      this.meter.remove();
    }
  }

  #progress(event) {
    const { stage, done = event.done_tokens, total = event.total_tokens } = event;
    const text = this.stage.lastElementChild;
    text.textContent = total ? `Reading ${count(total)} prompt tokens` : stage || "Working";
    this.meter.hidden = !total;
    if (total) {
      this.meter.max = total;
      this.meter.value = done;
    }
  }

  #piece(text) {
    if (!text) return;
    this.#text += text;
    this.stage.hidden = true;
    this.meter.hidden = true;
    this.answer.append(text);
  }

  #done(data) {
    const answer = typeof data.answer === "string" ? data.answer : (data.answer?.text ?? this.#text);
    if (answer !== this.#text) this.answer.replaceChildren(answer);
    this.#text = answer;
    if (!answer.trim())
      this.note.append(h("p", { class: "muted" }, "The model ended its reply without a word."));
    const hit = data.plan?.cache_hit;
    if (hit) this.note.append(this.#fromCache(hit));
    this.side.append(...sourcesList(data.sources ?? [], answer, this.#request.kb));
    if (data.timing) this.below.append(timeBar(data.timing, data.full_prefill_estimate_s, hit));
    if (!hit && data.plan) this.below.append(promptMap(data.plan, data.sources ?? [], this.#request));
    announce(`Answer: ${answer}`);
  }

  #fromCache(hit) {
    const same = hit.question.trim() === this.#request.question.trim();
    const asked = same ? "This question was answered" : `“${hit.question}” was answered`;
    const close = same ? "" : ` Similarity ${hit.similarity.toFixed(2)}.`;
    const judged = typeof hit.judged === "number";
    return h(
      "div",
      { class: "cached" },
      icon("bolt"),
      h(
        "p",
        {},
        h("strong", {}, "From the answer cache. "),
        `${asked} ${ago(hit.made_at_s)}; ${judged ? "the model judged that both ask the same" : "no model ran"}.${close}`,
      ),
      h(
        "button",
        {
          type: "button",
          class: "button",
          onclick: () => this.#again({ ...this.#request, cache: "refresh" }),
        },
        "Compute it again",
      ),
      !same &&
        h("button", { type: "button", class: "button", onclick: () => this.#reject() }, "Not what I asked"),
    );
  }

  /** Say no to the answer of another question, and ask again. */
  async #reject() {
    const { kb, question } = this.#request;
    try {
      await call("POST", inKb(kb, "/reject"), { body: { question } });
      this.#again(this.#request);
    } catch (error) {
      this.#failed(error);
    }
  }

  #failed(error) {
    const again = h(
      "button",
      { type: "button", class: "button", onclick: () => this.#again(this.#request) },
      "Ask again",
    );
    if (error.name === "AbortError") {
      this.note.append(h("div", { class: "stopped" }, h("p", { class: "muted" }, "Stopped."), again));
      return announce("Stopped.");
    }
    let message = error instanceof ApiError ? error.message : `Something went wrong: ${error.message}`;
    if (error instanceof ConnectionLost) {
      message = this.#text
        ? "The connection was lost while the answer was arriving. What is above may be incomplete."
        : "The connection to the server was lost before an answer came.";
    }
    this.note.append(
      h("div", { class: "failure", role: "alert" }, icon("warning"), h("p", {}, message), again),
    );
    return undefined;
  }
}
