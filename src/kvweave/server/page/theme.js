// Set the colours before the first paint. A choice made with the switch wins over the system's.
"use strict";

(() => {
  const stored = (() => {
    try {
      return localStorage.getItem("kvweave-theme");
    } catch {
      return null; // storage is turned off: the system's colours
    }
  })();
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
})();
