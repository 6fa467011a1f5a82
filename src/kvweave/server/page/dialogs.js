// Dialogs: a confirmation, the API key. The browser holds the focus inside and gives it back.

import { freshId, h, icon } from "./dom.js";

/**
 * Open a dialog with this title and content; `close(value)` ends it. Resolves to the value, or null when dismissed.
 * It is dismissed when the view changes, as by the Back button, unless it belongs to all views.
 */
export function openDialog(title, content, { wide = false, ofAllViews = false } = {}) {
  return new Promise((resolve) => {
    let result = null;
    const heading = freshId("dialog");
    const close = (value) => {
      result = value;
      dialog.close();
    };
    const dialog = h(
      "dialog",
      { class: wide ? "dialog dialog-wide" : "dialog", "aria-labelledby": heading },
      h(
        "header",
        { class: "dialog-head" },
        h("h2", { id: heading }, title),
        h(
          "button",
          { type: "button", class: "icon-button", "aria-label": "Close", onclick: () => dialog.close() },
          icon("close"),
        ),
      ),
    );
    dialog.append(...[content(close)].flat());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
    const dismiss = () => dialog.close();
    if (!ofAllViews) addEventListener("hashchange", dismiss);
    dialog.addEventListener("close", () => {
      removeEventListener("hashchange", dismiss);
      dialog.remove();
      resolve(result);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** Ask before something is deleted. Resolves to true if the person confirms. */
export async function confirmDeletion(title, text, button) {
  const answer = await openDialog(title, (close) => [
    h("p", { class: "dialog-text" }, text),
    h(
      "div",
      { class: "dialog-foot" },
      h(
        "button",
        { type: "button", class: "button", autofocus: true, onclick: () => close(false) },
        "Cancel",
      ),
      h("button", { type: "button", class: "button danger", onclick: () => close(true) }, button),
    ),
  ]);
  return answer === true;
}

let pending = null; // several requests may be refused at once; one dialog serves them all

/** Ask for the API key. Resolves to null if the person gives none. */
export function askForKey(problem) {
  pending ??= keyDialog(problem).finally(() => {
    pending = null;
  });
  return pending;
}

function keyDialog(problem) {
  const field = freshId("key");
  const content = (close) => [
    h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          const key = event.currentTarget.elements.key.value.trim();
          if (key) close(key);
        },
      },
      h(
        "p",
        { class: "dialog-text" },
        "This server asks for a key. It is kept in this tab until you close it.",
      ),
      problem && h("p", { class: "field-error", role: "alert" }, problem),
      h("label", { class: "field-label", for: field }, "Key"),
      h("input", {
        id: field,
        name: "key",
        type: "password",
        class: "input",
        autocomplete: "off",
        required: true,
        autofocus: true,
      }),
      h(
        "div",
        { class: "dialog-foot" },
        h("button", { type: "submit", class: "button primary" }, "Use this key"),
      ),
    ),
  ];
  return openDialog("API key", content, { ofAllViews: true });
}
