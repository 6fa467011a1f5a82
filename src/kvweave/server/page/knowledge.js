// Knowledge bases: the list with its form, and one knowledge base with its documents.

import { call, inKb } from "./api.js";
import { confirmDeletion } from "./dialogs.js";
import { announce, failure, h, icon } from "./dom.js";
import { baseName, bytes, count, plural } from "./format.js";
import { uploadArea } from "./upload.js";

/** Return the view of one knowledge base, or of all if no name is given. */
export function kbView(name) {
  const element = h("div", { class: "view" });
  const refresh = () => (name ? showOne(element, name) : showAll(element));
  return { element, enter: refresh, refresh };
}

// All ---------------------------------------------------------------------------------------------------------------

async function showAll(element) {
  const list = h("div", { class: "list-area" }, h("p", { class: "loading" }, "Loading"));
  element.replaceChildren(
    h(
      "div",
      { class: "view-head" },
      h("h1", {}, "Knowledge bases"),
      h("p", { class: "view-text" }, "Each holds its own documents, answers and stored KV."),
    ),
    creation(),
    list,
  );
  try {
    const { data } = await call("GET", "v1/kb");
    list.replaceChildren(data.length ? h("ul", { class: "rows" }, data.map(row)) : empty());
  } catch (error) {
    list.replaceChildren(failure(error, () => showAll(element)));
  }
}

function row({ name, documents, chunks, bytes: size }) {
  return h(
    "li",
    {},
    h(
      "a",
      { class: "row", href: `#/kb/${encodeURIComponent(name)}` },
      h("span", { class: "row-name" }, name),
      h(
        "span",
        { class: "row-facts" },
        `${plural(documents, "document")} · ${plural(chunks, "chunk")} · ${bytes(size)}`,
      ),
      icon("chevron"),
    ),
  );
}

const empty = () =>
  h(
    "div",
    { class: "empty" },
    h("p", { class: "empty-title" }, "No knowledge base yet"),
    h("p", {}, "Give the first one a name, then add documents to it."),
  );

function creation() {
  const problem = h("p", { class: "field-error", id: "kb-error", role: "alert" });
  const input = h("input", {
    class: "input",
    id: "kb-name",
    required: true,
    autocomplete: "off",
    spellcheck: "false",
    placeholder: "my-notes",
    "aria-describedby": "kb-error",
    oninput: () => problem.replaceChildren(),
  });
  const create = async (event) => {
    event.preventDefault();
    const name = input.value.trim();
    if (!name) return;
    try {
      await call("POST", "v1/kb", { body: { name } });
      announce(`Created ${name}.`);
      location.hash = `#/kb/${encodeURIComponent(name)}`;
    } catch (error) {
      problem.textContent = error.message;
      input.focus();
    }
  };
  return h(
    "form",
    { class: "creation", onsubmit: create },
    h("label", { class: "field-label", for: "kb-name" }, "New knowledge base"),
    h(
      "div",
      { class: "creation-line" },
      input,
      h("button", { type: "submit", class: "button primary" }, icon("plus"), "Create"),
    ),
    problem,
  );
}

// One ---------------------------------------------------------------------------------------------------------------

async function showOne(element, name) {
  if (!element.hasChildNodes()) {
    element.append(
      h("a", { class: "back", href: "#/kb" }, icon("back"), "Knowledge bases"),
      h("div", { class: "view-head" }, h("h1", {}, name), h("p", { class: "view-text", id: "kb-facts" })),
      uploads(name),
      h(
        "section",
        { class: "documents", "aria-label": "Documents" },
        h("p", { class: "loading" }, "Loading"),
      ),
      h(
        "section",
        { class: "danger-zone", "aria-label": "Delete this knowledge base" },
        h("p", {}, "Deleting removes its documents, answers and stored KV for good."),
        h(
          "button",
          { type: "button", class: "button danger-quiet", onclick: () => deleteKb(name) },
          icon("trash"),
          "Delete knowledge base",
        ),
      ),
    );
  }
  await fillDocuments(element.querySelector(".documents"), name);
}

const areas = new Map(); // by name: uploads go on while another view is shown

function uploads(name) {
  const area =
    areas.get(name) ??
    uploadArea(name, () => isShown(name) && fillDocuments(document.querySelector(".documents"), name));
  areas.set(name, area);
  for (const done of area.querySelectorAll(".upload.finished")) done.remove();
  return area;
}

const isShown = (name) => location.hash === `#/kb/${encodeURIComponent(name)}`;

async function fillDocuments(section, name) {
  try {
    const found = await call("GET", inKb(name));
    const chunks = found.documents.reduce((sum, { chunks: own }) => sum + (own ?? 0), 0);
    const facts = document.getElementById("kb-facts");
    if (facts)
      facts.textContent = `${plural(found.documents.length, "document")}, ${plural(chunks, "chunk")}`;
    section.replaceChildren(
      h("h2", { class: "section-title" }, "Documents"),
      found.documents.length
        ? h(
            "ul",
            { class: "rows" },
            found.documents.map((one) => documentRow(one, name, section)),
          )
        : h("p", { class: "muted" }, "None yet."),
    );
  } catch (error) {
    section.replaceChildren(failure(error, () => fillDocuments(section, name)));
  }
}

function documentRow({ source, title, chunks, tokens }, name, section) {
  const shown = title || baseName(source);
  return h(
    "li",
    { class: "row" },
    icon("file"),
    h(
      "span",
      { class: "row-name", title: source },
      shown,
      shown !== source && h("span", { class: "row-path" }, source),
    ),
    h("span", { class: "row-facts" }, `${plural(chunks, "chunk")} · ${count(tokens)} tokens`),
    h(
      "button",
      {
        type: "button",
        class: "icon-button",
        "aria-label": `Delete ${shown}`,
        onclick: () => deleteDocument(source, shown, name, section),
      },
      icon("trash"),
    ),
  );
}

async function deleteDocument(source, shown, name, section) {
  if (
    !(await confirmDeletion(
      `Delete ${shown}?`,
      "Its chunks, their stored KV and the answers that came from it go with it.",
      "Delete document",
    ))
  )
    return;
  try {
    await call("DELETE", inKb(name, `/documents?source=${encodeURIComponent(source)}`));
    announce(`Deleted ${shown}.`);
    await fillDocuments(section, name);
    (section.querySelector(".row button") ?? document.getElementById("main")).focus();
  } catch (error) {
    section.prepend(failure(error));
  }
}

async function deleteKb(name) {
  if (
    !(await confirmDeletion(
      `Delete ${name}?`,
      "All of its documents, answers and stored KV go with it. This cannot be undone.",
      "Delete knowledge base",
    ))
  )
    return;
  try {
    await call("DELETE", inKb(name));
    announce(`Deleted ${name}.`);
    areas.delete(name);
    location.hash = "#/kb";
  } catch (error) {
    document.querySelector(".danger-zone")?.append(failure(error));
  }
}
