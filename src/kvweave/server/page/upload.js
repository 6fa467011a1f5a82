// Upload files into a knowledge base: drop them or choose them, watch their progress, see what became of each.

import { ApiError, EventParser, address, authorization, enterKey, inKb, messageOf } from "./api.js";
import { connectionLost } from "./connection.js";
import { announce, h, icon } from "./dom.js";
import { baseName, bytes, count, plural } from "./format.js";

const BATCH_FILES = 16;
const BATCH_BYTES = 32_000_000;

/** Return the drop area with its list of files. `changed` is called after each batch. */
export function uploadArea(kb, changed) {
  const list = h("ul", { class: "uploads", "aria-label": "Uploads" });
  const input = h("input", {
    type: "file",
    id: "files",
    class: "visually-hidden",
    multiple: true,
    onchange: () => take([...input.files]),
  });
  const drop = h(
    "div",
    { class: "drop" },
    icon("upload"),
    h(
      "p",
      { class: "drop-text" },
      h("label", { class: "drop-button", for: "files" }, "Choose files"),
      h("span", { class: "wide-only" }, " or drop them here"),
    ),
    h("p", { class: "muted" }, "Text, Markdown, HTML, PDF, Word, e-mail, source code"),
    input,
  );
  let queue = Promise.resolve();

  function take(files) {
    input.value = "";
    const entries = files.map((file) => new Entry(file));
    list.prepend(...entries.map((entry) => entry.element));
    if (entries.length) announce(`Uploading ${plural(entries.length, "file")}.`);
    for (const batch of batches(entries)) queue = queue.then(() => send(kb, batch)).then(changed);
  }

  let inside = 0; // entering a child comes before leaving its parent
  const over = (by) => (event) => {
    event.preventDefault();
    inside = Math.max(0, inside + by);
    drop.classList.toggle("over", inside > 0);
  };
  drop.addEventListener("dragenter", over(1));
  drop.addEventListener("dragleave", over(-1));
  drop.addEventListener("dragover", (event) => event.preventDefault());
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    inside = 0;
    drop.classList.remove("over");
    take(await droppedFiles(event.dataTransfer));
  });
  return h("section", { class: "adding", "aria-label": "Add documents" }, drop, list);
}

/** One file and its line in the list. */
class Entry {
  constructor(file) {
    this.file = file;
    this.meter = h("progress", {
      class: "meter",
      max: 1,
      value: 0,
      "aria-label": `Progress of ${file.name}`,
    });
    this.status = h("span", { class: "upload-status" }, "Waiting");
    this.element = h(
      "li",
      { class: "upload" },
      h("span", { class: "upload-name" }, file.name, h("span", { class: "muted" }, ` ${bytes(file.size)}`)),
      this.status,
      this.meter,
    );
  }

  working(text, done, total) {
    this.status.textContent = text;
    if (total > 0) this.meter.value = done / total;
    else this.meter.removeAttribute("value"); // it takes as long as it takes
  }

  ended(text, failed = false) {
    this.meter.remove();
    this.status.replaceChildren(icon(failed ? "warning" : "check"), text);
    this.element.classList.add(failed ? "failed" : "finished");
  }
}

function* batches(entries) {
  let batch = [];
  let size = 0;
  for (const entry of entries) {
    if (batch.length > 0 && (batch.length >= BATCH_FILES || size + entry.file.size > BATCH_BYTES)) {
      yield batch;
      [batch, size] = [[], 0];
    }
    batch.push(entry);
    size += entry.file.size;
  }
  if (batch.length > 0) yield batch;
}

async function send(kb, entries) {
  try {
    const report = await post(kb, entries);
    for (const entry of entries) conclude(entry, report);
    const failed = entries.filter((entry) => entry.element.classList.contains("failed")).length;
    announce(
      failed ? `${plural(failed, "file")} could not be added.` : `Added ${plural(entries.length, "file")}.`,
    );
  } catch (error) {
    for (const entry of entries) entry.ended(error.message, true);
    announce(error.message);
  }
}

/** Show what the report says about one file. */
function conclude(entry, report) {
  const isIt = (path) => path === entry.file.name || baseName(path) === entry.file.name;
  const skipped = (report.skipped ?? []).find(({ path }) => isIt(path));
  if (skipped) entry.ended(skipped.reason, true);
  else if ((report.unchanged ?? []).some(isIt)) entry.ended("Already there");
  else if ((report.changed ?? []).some(isIt)) entry.ended("Replaced");
  else if ((report.added ?? []).some(isIt)) entry.ended("Added");
  else entry.ended("The server's report does not name this file; it was not added.", true);
}

/** Post a batch and resolve to its report. XMLHttpRequest, because fetch does not say how much has been sent. */
function post(kb, entries) {
  const form = new FormData();
  for (const { file } of entries) form.append("files", file, file.name);
  const working = (text, done, total) => entries.forEach((entry) => entry.working(text, done, total));
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const parser = new EventParser();
    let read = 0;
    let report = null;
    request.open("POST", address(inKb(kb, "/documents")));
    request.setRequestHeader("Accept", "text/event-stream");
    for (const [name, value] of Object.entries(authorization())) request.setRequestHeader(name, value);
    request.upload.onprogress = ({ loaded, total }) => working("Sending", loaded, total);
    request.upload.onload = () => working("Reading", 0, 0);
    request.onprogress = () => {
      if (request.status !== 200) return;
      for (const { event, data } of parser.push(request.responseText.slice(read))) {
        if (event === "progress") working(stageText(data), data.done, data.total);
        else if (event === "done") report = data.report ?? data;
        else if (event === "error") reject(new ApiError(messageOf(data), 500));
      }
      read = request.responseText.length;
    };
    request.onerror = () => {
      connectionLost();
      reject(new Error("The connection was lost. Add this file again."));
    };
    request.onload = () => {
      request.onprogress();
      if (report !== null) return resolve(report);
      const error = new ApiError(messageOf(request.responseText, request), request.status);
      if (request.status !== 401) return reject(error);
      return enterKey(error)
        .then(() => post(kb, entries))
        .then(resolve, reject);
    };
    request.send(form);
  });
}

function stageText({ stage, done, total }) {
  const name = stage ? stage[0].toUpperCase() + stage.slice(1) : "Working";
  return total > 1 ? `${name}, ${count(done)} of ${count(total)}` : name;
}

/** Return the dropped files, those in dropped folders too. */
async function droppedFiles(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (entries.length === 0) return [...transfer.files];
  return (await Promise.all(entries.map(filesBelow))).flat();
}

async function filesBelow(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // at most 100 at a time
    if (some.length === 0) break;
    found.push(...some.filter(({ name }) => !name.startsWith(".")));
  }
  return (await Promise.all(found.map(filesBelow))).flat();
}
