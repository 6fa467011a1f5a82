// The question box, with the knowledge base to ask and the options of a request.

import { call } from "./api.js";
import { h, icon } from "./dom.js";

const CACHE_USES = [
  ["use", "Use it"],
  ["refresh", "Compute again and store"],
  ["off", "Leave it out"],
];

/** Return the form. `handlers.ask(request)` gets `{kb, question, …options}`; `handlers.stop()` ends the running one. */
export function composer(handlers) {
  const question = h("textarea", {
    id: "question",
    rows: 1,
    required: true,
    placeholder: "Ask a question",
    autocomplete: "off",
    "aria-label": "Your question",
    "aria-keyshortcuts": "/",
    oninput: () => resize(question),
    onkeydown: (event) => {
      if (event.key === "ArrowUp" && question.value === "" && last) {
        event.preventDefault();
        write(last);
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    },
  });
  const kb = h("select", { id: "kb", class: "quiet-select", "aria-label": "Knowledge base", hidden: true });
  const hint = h("p", { class: "composer-hint" });
  const button = h("button", { type: "submit", class: "send", "aria-label": "Ask" }, icon("arrow-up"));
  const options = optionFields();
  let busy = false;
  let last = ""; // the question asked before; the arrow up brings it back

  const write = (text) => {
    question.value = text;
    resize(question);
  };
  const submit = (request) => {
    last = request.question;
    write("");
    handlers.ask(request);
  };

  const form = h(
    "form",
    {
      class: "composer",
      onsubmit: (event) => {
        event.preventDefault();
        if (busy) return handlers.stop();
        const text = question.value.trim();
        if (!text || !kb.value) return question.focus();
        return submit({ kb: kb.value, question: text, ...options.values() });
      },
    },
    question,
    h("div", { class: "composer-foot" }, kb, options.button, h("span", { class: "grow" }), button),
    options.panel,
  );

  /** Fill in the knowledge bases that there are now. */
  async function enter() {
    try {
      const { data } = await call("GET", "v1/kb");
      const chosen = kb.value || sessionStorage.getItem("kvweave-kb");
      kb.replaceChildren(...data.map(({ name }) => h("option", { value: name }, name)));
      if (data.some(({ name }) => name === chosen)) kb.value = chosen;
      kb.hidden = data.length === 0;
      showHint(data);
    } catch (error) {
      hint.replaceChildren(error.message);
    }
  }

  function showHint(found) {
    const empty = found.length === 0 || found.every((one) => !one.documents);
    hint.replaceChildren(
      ...(empty
        ? ["There is nothing to ask yet. ", h("a", { href: "#/kb" }, "Add documents"), " first."]
        : [
            h("kbd", {}, "Enter"),
            " asks, ",
            h("kbd", {}, "Shift"),
            " + ",
            h("kbd", {}, "Enter"),
            " begins a new line, ",
            h("kbd", {}, "/"),
            " comes back here.",
          ]),
    );
    hint.classList.toggle("keys", !empty);
  }

  kb.addEventListener("change", () => sessionStorage.setItem("kvweave-kb", kb.value));
  return {
    element: h("div", { class: "composer-area" }, form, hint),
    enter: () => {
      enter();
      if (matchMedia("(pointer: fine)").matches) question.focus({ preventScroll: true });
    },
    ask: submit,
    busy(now) {
      busy = now;
      button.setAttribute("aria-label", now ? "Stop" : "Ask");
      button.replaceChildren(icon(now ? "stop" : "arrow-up"));
      button.classList.toggle("stop", now);
      question.required = !now; // the button that stops needs no question
    },
  };
}

function resize(question) {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, 240)}px`;
}

/** The options of a request; an empty field takes the server's setting, which is shown in it. */
function optionFields() {
  const recipe = h("input", {
    class: "input",
    id: "recipe",
    placeholder: "as set",
    autocomplete: "off",
    spellcheck: "false",
    list: "recipes",
  });
  const recipes = h("datalist", { id: "recipes" });
  const ratio = h("input", {
    class: "input",
    id: "ratio",
    type: "number",
    min: 0,
    max: 1,
    step: "any",
    placeholder: "as set",
  });
  const topK = h("input", {
    class: "input",
    id: "top-k",
    type: "number",
    min: 1,
    step: 1,
    placeholder: "as set",
  });
  const cache = h(
    "select",
    { class: "input", id: "cache" },
    CACHE_USES.map(([value, text]) => h("option", { value }, text)),
  );
  const field = (label, control, help) =>
    h(
      "div",
      { class: "field" },
      h("label", { class: "field-label", for: control.id }, label),
      control,
      h("p", { class: "field-help" }, help),
    );
  const panel = h(
    "div",
    { class: "options", id: "options", hidden: true },
    field("Recipe", recipe, "The method that reuses stored KV."),
    recipes,
    field("Ratio", ratio, "Share of the prompt to recompute, 0 to 1."),
    field("Chunks", topK, "Passages in front of the question."),
    field("Answer cache", cache, "What to do with stored answers."),
  );
  const button = h(
    "button",
    { type: "button", class: "quiet", "aria-expanded": "false", "aria-controls": "options", onclick: toggle },
    icon("settings"),
    "Options",
  );

  function toggle() {
    panel.hidden = !panel.hidden;
    button.setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) showSettings();
  }

  async function showSettings() {
    try {
      const found = await call("GET", "v1/settings");
      const settings = new Map(
        (found.data ?? found).map((setting) => [setting.name.split(".").pop(), setting]),
      );
      for (const [name, control] of [
        ["recipe", recipe],
        ["ratio", ratio],
        ["top_k", topK],
      ]) {
        const value = settings.get(name)?.value;
        if (value !== undefined && value !== null) control.placeholder = String(value);
      }
      recipes.replaceChildren(
        ...(settings.get("recipe")?.choices ?? []).map((value) => h("option", { value })),
      );
    } catch {
      // the fields work without: what is left empty is as set
    }
  }

  const number = (control) => (control.value === "" ? undefined : Number(control.value));
  return {
    panel,
    button,
    values: () => ({
      recipe: recipe.value.trim() || undefined,
      ratio: number(ratio),
      top_k: number(topK),
      cache: cache.value === "use" ? undefined : cache.value,
    }),
  };
}
