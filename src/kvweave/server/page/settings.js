// The settings of the server: names, what they do, values and defaults.

import { call } from "./api.js";
import { failure, h, icon } from "./dom.js";
import { bytes, plural } from "./format.js";

export function settingsView() {
  const body = h("div", {}, h("p", { class: "loading" }, "Loading"));
  const element = h(
    "div",
    { class: "view" },
    h(
      "div",
      { class: "view-head" },
      h("h1", {}, "Settings"),
      h(
        "p",
        { class: "view-text" },
        "Set by flags, by environment variables or in ",
        h("code", {}, "config.toml"),
        " before the server starts.",
      ),
    ),
    body,
  );
  const refresh = async () => {
    try {
      const found = await call("GET", "v1/settings");
      body.replaceChildren(...list(found.data ?? found));
    } catch (error) {
      body.replaceChildren(failure(error, refresh));
    }
  };
  return { element, enter: refresh, refresh };
}

function list(settings) {
  const rows = settings.map((setting) => ({ setting, element: row(setting) }));
  const shown = h("p", { class: "muted", role: "status" });
  const onlyChanged = h("input", { type: "checkbox", id: "only-changed", onchange: filter });
  const search = h("input", {
    type: "search",
    class: "input",
    id: "filter",
    placeholder: "Find a setting",
    "aria-label": "Find a setting",
    oninput: filter,
  });

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/);
    let number = 0;
    for (const { setting, element } of rows) {
      const text = `${setting.name} ${setting.help}`.toLowerCase();
      const fits = words.every((word) => text.includes(word)) && (!onlyChanged.checked || isChanged(setting));
      element.hidden = !fits;
      number += fits ? 1 : 0;
    }
    shown.textContent = plural(number, "setting");
  }

  filter();
  return [
    h(
      "div",
      { class: "filter-line" },
      h("div", { class: "search" }, icon("search"), search),
      h("label", { class: "check" }, onlyChanged, "Changed only"),
      shown,
    ),
    h(
      "dl",
      { class: "settings" },
      rows.map(({ element }) => element),
    ),
  ];
}

const isChanged = ({ value, default: standard }) => JSON.stringify(value) !== JSON.stringify(standard);

function row(setting) {
  const changed = isChanged(setting);
  return h(
    "div",
    { class: "setting" },
    h("dt", {}, h("code", {}, setting.name)),
    h("dd", { class: "setting-help" }, setting.help),
    h(
      "dd",
      { class: "setting-value" },
      h("code", { class: changed ? "value changed" : "value" }, shownValue(setting, setting.value)),
      h(
        "span",
        { class: "muted" },
        changed ? ` default ${shownValue(setting, setting.default)}` : " default",
      ),
    ),
  );
}

function shownValue({ name }, value) {
  if (value === null || value === undefined || value === "") return "not set";
  if (value === true) return "yes";
  if (value === false) return "no";
  if (name.endsWith("_bytes") && typeof value === "number") return bytes(value);
  return Array.isArray(value) || typeof value === "object" ? JSON.stringify(value) : String(value);
}
