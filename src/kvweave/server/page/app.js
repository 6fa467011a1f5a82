// The frame: views, colours, what the server is.

import { call } from "./api.js";
import { askView } from "./ask.js";
import { cachesView } from "./caches.js";
import { check, onReturn } from "./connection.js";
import { baseName } from "./format.js";
import { kbView } from "./knowledge.js";
import { settingsView } from "./settings.js";

const VIEWS = {
  ask: { title: "Ask", make: askView },
  kb: { title: "Knowledge bases", make: kbView },
  caches: { title: "Caches", make: cachesView },
  settings: { title: "Settings", make: settingsView },
};

const main = document.getElementById("main");
const kept = new Map(); // the view of questions stays as it is while others are looked at
let current = null;

/** Show the view that the address names, `#/<view>/<argument>`. */
function show(event) {
  const [, name = "ask", argument = ""] = location.hash.split("/");
  const view = VIEWS[name] ?? VIEWS.ask;
  current?.leave?.();
  current = kept.get(view) ?? view.make(decodeURIComponent(argument));
  if (current.keep) kept.set(view, current);
  main.replaceChildren(current.element);
  current.enter?.();
  document.title = `${view.title} · kvweave`;
  for (const link of document.querySelectorAll("#tabs a")) {
    const active = link.getAttribute("href") === `#/${name in VIEWS ? name : "ask"}`;
    if (active) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (event) {
    main.focus({ preventScroll: true });
    scrollTo(0, 0);
  }
}

// Colours -----------------------------------------------------------------------------------------------------------

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");
const isDark = () =>
  (document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";
const showTheme = () => themeButton.setAttribute("aria-pressed", String(isDark()));

function switchTheme() {
  const next = isDark() ? "light" : "dark";
  const asSystem = (next === "dark") === systemDark.matches;
  if (asSystem) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (asSystem) localStorage.removeItem("kvweave-theme");
    else localStorage.setItem("kvweave-theme", next);
  } catch {
    // storage is turned off: the choice holds for this page
  }
  showTheme();
}

themeButton.addEventListener("click", switchTheme);
systemDark.addEventListener("change", showTheme);
showTheme();

// The server --------------------------------------------------------------------------------------------------------

async function showModel() {
  const line = document.getElementById("server-state");
  try {
    const models = await call("GET", "v1/models");
    const id = models.data[0]?.id ?? "";
    line.textContent = id ? baseName(id) : "";
    line.title = id;
  } catch {
    line.textContent = ""; // the notice says why
  }
}

onReturn((before) => {
  showModel();
  if (before !== "unknown") current?.refresh?.();
});

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  main.focus();
});

addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog, [contenteditable]");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (!location.hash.startsWith("#/ask") && location.hash !== "") location.hash = "#/ask";
  setTimeout(() => document.getElementById("question")?.focus());
});

addEventListener("hashchange", show);
show();
check();
