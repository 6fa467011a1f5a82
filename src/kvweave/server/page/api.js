// Talk to the server: JSON, streamed events, errors, the API key.

import { connectionLost, connectionWorks } from "./connection.js";
import { askForKey } from "./dialogs.js";

/** The server's own message. `status` is HTTP's. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server did not answer, or stopped in the middle. */
export class ConnectionLost extends Error {}

const KEY = "kvweave-api-key";

/** Return the headers of a request: the API key, if one was entered in this tab. */
export function authorization() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Ask the person for a key, after the server has refused a request. Raises the refusal if they give none. */
export async function enterKey(refusal) {
  const hadOne = sessionStorage.getItem(KEY) !== null;
  const key = await askForKey(hadOne ? refusal.message : "");
  if (key === null) throw refusal;
  sessionStorage.setItem(KEY, key);
}

/** The address of a path, below wherever this page is served from. */
export const address = (path) => new URL(path, document.baseURI).href;

/** The address of a knowledge base, or of something in it. */
export const inKb = (name, rest = "") => `v1/kb/${encodeURIComponent(name)}${rest}`;

/** Send a request and return the JSON of its reply, or null if there is none. */
export async function call(method, path, { body, signal } = {}) {
  const response = await send(method, path, { body, signal, accept: "application/json" });
  const text = await reading(response.text(), signal);
  return text ? JSON.parse(text) : null;
}

/** Send a request and yield the events of its reply as `{event, data}`. */
export async function* stream(path, body, signal) {
  const response = await send("POST", path, { body, signal, accept: "text/event-stream" });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  for (;;) {
    const { done, value } = await reading(reader.read(), signal);
    if (done) return;
    for (const event of parser.push(value)) {
      if (event.event === "error") throw new ApiError(messageOf(event.data), 500);
      yield event;
    }
  }
}

async function send(method, path, { body, signal, accept }) {
  const headers = { Accept: accept, ...authorization() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const request = { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) };
  const response = await reading(fetch(address(path), request), signal);
  connectionWorks();
  if (response.ok) return response;
  const error = new ApiError(messageOf(await response.text(), response), response.status);
  if (error.status !== 401) throw error;
  await enterKey(error);
  return send(method, path, { body, signal, accept });
}

async function reading(promise, signal) {
  try {
    return await promise;
  } catch (error) {
    if (signal?.aborted || error.name === "AbortError") throw error;
    connectionLost();
    throw new ConnectionLost("The connection to the server was lost.");
  }
}

/** Return the message of an error's body, whatever shape it has. */
export function messageOf(body, response) {
  let found = body;
  try {
    found = typeof body === "string" ? JSON.parse(body) : body;
  } catch {
    found = null; // an error page of something between us and the server
  }
  const message = found?.error?.message ?? found?.detail ?? found?.message;
  if (typeof message === "string") return message;
  return response
    ? `The server answered ${response.status} ${response.statusText}`.trim()
    : "The server reported an error.";
}

/** Cut a stream of text into server-sent events. Data is JSON; comments (pings) are skipped. */
export class EventParser {
  #rest = "";

  push(text) {
    this.#rest += text.replaceAll("\r\n", "\n");
    const blocks = this.#rest.split("\n\n");
    this.#rest = blocks.pop();
    return blocks.map(parseEvent).filter((event) => event !== null);
  }
}

function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  const text = data.join("\n");
  if (!text || text === "[DONE]") return null;
  return { event, data: JSON.parse(text) };
}
