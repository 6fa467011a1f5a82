"""A small server that speaks what the page reads, with the page's files: its answers and troubles are set by a test."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = Path(str(files("kvweave.server"))) / "page"
SAMPLES = Path(str(files("kvweave.samples"))) / "documents"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass
class Script:
    """What the server answers, and what goes wrong."""

    bases: dict[str, dict[str, str]] = field(default_factory=dict)
    answer: str = "walnut"
    cached: bool = False
    piece_s: float = 0.0
    last_piece: threading.Event | None = None  # it waits for that
    cut_after: int | None = None
    error: str | None = None
    key: str | None = None
    unreadable: str = ""
    map_tokens: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)


class Refusal(Exception):
    """An error with the API's shape."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class PageServer:
    """The server in a thread of its own; `stop` and `start` keep its port."""

    def __init__(self, script: Script) -> None:
        self.script, self.port = script, 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        script = self.script

        class Handler(_Handler):
            state = script

        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    state: Script

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def handle(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the browser left, as tests make it do
            super().handle()

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/" or path.startswith("/static/"):
            self._file(PAGE / (path.removeprefix("/static/") if path != "/" else "index.html"))
        elif path == "/health":
            self._json({"status": "ready"})
        else:
            try:
                self._api(method, path, body)
            except Refusal as refusal:
                self._json(
                    {"error": {"message": refusal.message, "type": "invalid_request_error"}}, refusal.status
                )

    def _api(self, method: str, path: str, body: bytes) -> None:
        state = self.state
        if state.key is not None and self.headers.get("Authorization") != f"Bearer {state.key}":
            given = "Authorization" in self.headers
            raise Refusal(401, "Incorrect API key provided" if given else "You did not provide an API key")
        for verb, pattern, handler in _ROUTES:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                handler(self, body, *map(unquote, match.groups()))
                return
        raise Refusal(404, f"there is no {method} {path}")

    def models(self, body: bytes) -> None:
        self._json({"data": [{"id": "/models/gemma-3-270m-it"}]})

    def settings(self, body: bytes) -> None:
        self._json({"data": SETTINGS})

    def bases(self, body: bytes) -> None:
        self._json({"data": [summary(name, held) for name, held in self.state.bases.items()]})

    def create(self, body: bytes) -> None:
        name = json.loads(body)["name"]
        if not re.fullmatch(r"[\w.-]+", name):
            raise Refusal(
                400, f"{name!r} is no name of a knowledge base: use letters, digits, '-', '_' and '.'"
            )
        self.state.bases[name] = {}
        self._json({"name": name}, 201)

    def delete(self, body: bytes, name: str) -> None:
        self._base(name)
        del self.state.bases[name]
        self._json({"deleted": True})

    def describe(self, body: bytes, name: str) -> None:
        documents = [
            {"source": source, "title": "", "chunks": 1 + len(text) // 300, "tokens": len(text) // 4}
            for source, text in self._base(name).items()
        ]
        self._json({"name": name, "documents": documents})

    def document(self, body: bytes, name: str) -> None:
        source = parse_qs(urlsplit(self.path).query).get("source", [""])[0]
        text = self._base(name).get(source)
        if text is None:
            raise Refusal(404, f"there is no document {source!r}")
        self._json({"source": source, "text": text})

    def remove(self, body: bytes, name: str) -> None:
        source = parse_qs(urlsplit(self.path).query)["source"][0]
        if self._base(name).pop(source, None) is None:
            raise Refusal(404, f"there is no document {source!r}")
        self._json({"removed": 1})

    def upload(self, body: bytes, name: str) -> None:
        base = self._base(name)
        found = dict(uploaded(self.headers["Content-Type"], body))
        self._open_stream()
        for done in range(len(found) + 1):
            self._event("progress", {"stage": "reading", "done": done, "total": len(found)})
            time.sleep(self.state.piece_s)
        for done in range(5):
            self._event("progress", {"stage": "computing KV", "done": done, "total": 4})
            time.sleep(self.state.piece_s)
        bad = {file for file in found if self.state.unreadable and self.state.unreadable in file}
        added = {file: text for file, text in found.items() if file not in bad}
        unchanged = [file for file, text in added.items() if base.get(file) == text]
        base.update(added)
        self._event(
            "done",
            {
                "report": {
                    "added": [file for file in added if file not in unchanged],
                    "unchanged": unchanged,
                    "skipped": [
                        {"path": file, "reason": "the PDF is encrypted; remove its password first"}
                        for file in bad
                    ],
                }
            },
        )

    def ask(self, body: bytes, name: str) -> None:
        state, request = self.state, json.loads(body)
        state.asked.append(request)
        base = self._base(name)
        if state.error:
            raise Refusal(400, state.error)
        if not base:
            raise Refusal(409, f"the knowledge base {name!r} is empty: add documents first")
        cached = state.cached and request.get("cache") != "refresh"
        self._open_stream()
        for done in () if cached else range(0, 641, 160):
            self._event("progress", {"done_tokens": done, "total_tokens": 640})
            time.sleep(state.piece_s)
        pieces = re.findall(r"\S+\s*|\s+", state.answer)
        for number, piece in enumerate(pieces):
            if number == state.cut_after:
                self.close_connection = True
                return
            if state.last_piece is not None and number == len(pieces) - 1:
                state.last_piece.wait(60)
            self._event("piece", {"text": piece})
            time.sleep(state.piece_s)
        self._event("done", answered(state.answer, base, request["question"], cached))

    def explain(self, body: bytes, name: str) -> None:
        base = self._base(name)
        tokens = prompt_tokens(base, json.loads(body)["question"])
        if self.state.map_tokens:
            tokens = (tokens * (1 + self.state.map_tokens // len(tokens)))[: self.state.map_tokens]
        self._json({"tokens": tokens})

    def reject(self, body: bytes, name: str) -> None:
        self.state.cached = False
        self.state.rejected.append(json.loads(body)["question"])
        self._json({"rejected": ["What is Glorric's password?"]})

    def caches(self, body: bytes, name: str) -> None:
        self._base(name)
        self._json(CACHES)

    def _base(self, name: str) -> dict[str, str]:
        if name not in self.state.bases:
            raise Refusal(404, f"there is no knowledge base {name!r}")
        return self.state.bases[name]

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self.send_error(404)
            return
        self._send(path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8")

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def _send(self, data: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)

    def _open_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.wfile.write(b": ping\n\n")

    def _event(self, name: str, data: Any) -> None:
        self.wfile.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()


_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", "/v1/models", _Handler.models),
    ("GET", "/v1/settings", _Handler.settings),
    ("GET", "/v1/kb", _Handler.bases),
    ("POST", "/v1/kb", _Handler.create),
    ("GET", "/v1/kb/([^/]+)", _Handler.describe),
    ("DELETE", "/v1/kb/([^/]+)", _Handler.delete),
    ("GET", "/v1/kb/([^/]+)/documents", _Handler.document),
    ("POST", "/v1/kb/([^/]+)/documents", _Handler.upload),
    ("DELETE", "/v1/kb/([^/]+)/documents", _Handler.remove),
    ("POST", "/v1/kb/([^/]+)/ask", _Handler.ask),
    ("POST", "/v1/kb/([^/]+)/explain", _Handler.explain),
    ("POST", "/v1/kb/([^/]+)/reject", _Handler.reject),
    ("GET", "/v1/kb/([^/]+)/caches", _Handler.caches),
]


def samples() -> dict[str, str]:
    """Return the sample documents by name."""
    return {
        path.name: path.read_text() for path in sorted(SAMPLES.iterdir()) if path.suffix in (".md", ".txt")
    }


def summary(name: str, held: dict[str, str]) -> dict[str, Any]:
    """Return a row of the list of knowledge bases."""
    chunks = sum(1 + len(text) // 300 for text in held.values())
    return {"name": name, "documents": len(held), "chunks": chunks, "bytes": chunks * 3_400_000}


def uploaded(kind: str, body: bytes) -> Iterator[tuple[str, str]]:
    """Yield name and text of each file of a multipart body."""
    message = message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
    for part in message.get_payload():
        yield part.get_filename(), part.get_payload(decode=True).decode(errors="replace")


def sources(base: dict[str, str]) -> list[dict[str, Any]]:
    """Return five sources; the passage of passwords.md begins behind its first paragraph."""
    chosen = [
        name
        for name in ("passwords.md", "access-codes.md", "badges.txt", "notice.txt", "lodgers.txt")
        if name in base
    ]
    found = []
    for rank, name in enumerate(chosen or list(base)[:5]):
        start = base[name].find("\n\n") + 2 if name == "passwords.md" else 0
        text = base[name][start:]
        score = 0.87 - 0.13 * rank
        found.append(
            {"document": name, "start": start, "end": start + len(text), "text": text, "score": score}
        )
    return found


def prompt_tokens(base: dict[str, str], question: str) -> list[dict[str, Any]]:
    """Return the tokens of a prompt: words, with origins and scores that follow from the words."""
    tokens = [
        {"text": text, "origin": "exact"} for text in words("Answer the question from the passages below.\n")
    ]
    sought = {word.lower().strip(".,?") for word in question.split()}
    for rank, source in enumerate(sources(base)):
        for text in words(source["text"] + "\n"):
            score = (0.55 if text.lower().strip(" .,\n") in sought else 0.0) + (
                sum(map(ord, text)) % 97
            ) / 220
            origin = "exact" if rank == 0 else "recomputed" if score > 0.36 else "reused"
            tokens.append({"text": text, "origin": origin, **({} if rank == 0 else {"score": score})})
    return tokens + [{"text": text, "origin": "fresh"} for text in words(f"Question: {question}\nAnswer:")]


def words(text: str) -> list[str]:
    """Cut a text into something like tokens."""
    return re.findall(r" ?\w{1,6}| ?[^\w\s]|\s", text)


def plan(base: dict[str, str], question: str) -> dict[str, Any]:
    """Return the plan of that prompt."""
    tokens = prompt_tokens(base, question)
    counts = {
        f"{origin}_tokens": sum(t["origin"] == origin for t in tokens)
        for origin in ("exact", "reused", "recomputed", "fresh")
    }
    lengths = [
        (
            "system",
            -1,
            len(words("Answer the question from the passages below.\n")),
            "exact",
            "the same text as before",
        )
    ]
    for rank, source in enumerate(sources(base)):
        reason = "stored after the same text" if rank == 0 else "stored alone, int8"
        lengths.append(
            ("chunk", rank, len(words(source["text"] + "\n")), "exact" if rank == 0 else "reused", reason)
        )
    lengths.append(("question", -1, len(words(f"Question: {question}\nAnswer:")), "fresh", "new text"))
    spans, start = [], 0
    for kind, chunk, length, origin, reason in lengths:
        inside = tokens[start : start + length]
        recomputed = sum(token["origin"] == "recomputed" for token in inside)
        spans.append(
            {
                "kind": kind,
                "chunk": chunk,
                "start": start,
                "end": start + length,
                "origin": origin,
                "recomputed_tokens": recomputed,
                "reason": reason,
            }
        )
        start += length
    return {"recipe": "prophetkv", "ratio": 0.2, "spans": spans, "cache_hit": None, **counts}


def answered(answer: str, base: dict[str, str], question: str, cached: bool) -> dict[str, Any]:
    """Return the data of a `done` event."""
    hit = {"question": "What is Glorric's password?", "similarity": 0.93, "made_at_s": time.time() - 1260}
    if cached:
        empty = {"recipe": "prophetkv", "spans": [], "cache_hit": hit}
        return {
            "answer": answer,
            "sources": sources(base),
            "plan": empty,
            "timing": {"total_s": 0.0094},
            "full_prefill_estimate_s": None,
        }
    return {
        "answer": answer,
        "sources": sources(base),
        "plan": plan(base, question),
        "timing": {
            "retrieve_s": 0.021, "tokenize_s": 0.004, "match_s": 0.038, "place_s": 0.026, "select_s": 0.047,
            "recompute_s": 0.184, "ttft_s": 0.324, "decode_s": 0.241, "total_s": 0.57, "answer_tokens": 4,
        },
        "full_prefill_estimate_s": 1.31,
    }  # fmt: skip


CACHES: dict[str, Any] = {
    "kv": {
        "entries": 214, "tokens": 61_240, "bytes": 1_310_000_000, "limit_bytes": 4_000_000_000,
        "hits": 1386, "misses": 212, "evicted": 31, "damaged": 0, "hit_rate": 0.867,
        "by_tier": {
            "device": {"entries": 0, "bytes": 0, "limit_bytes": 0, "hits": 0, "waiting": 0, "state": "none"},
            "host": {"entries": 62, "bytes": 412_000_000, "limit_bytes": 512_000_000, "hits": 903, "waiting": 0, "state": "of this process"},
            "disk": {"entries": 214, "bytes": 1_310_000_000, "limit_bytes": 4_000_000_000, "hits": 483, "waiting": 0, "state": ""},
            "shared": {"entries": 0, "bytes": 0, "limit_bytes": 0, "hits": 0, "waiting": 0, "state": "none"},
        },
        "by_kind": {
            "alone": {"entries": 120, "tokens": 38_400, "bytes": 840_000_000, "heat": 88.2},
            "prefix": {"entries": 58, "tokens": 21_100, "bytes": 452_000_000, "heat": 41.7},
            "observed": {"entries": 36, "tokens": 1740, "bytes": 18_000_000, "heat": 9.1},
        },
    },
    "answers": {"questions": 48, "answered": 41, "waiting": 7, "given": 96, "bytes": 210_000, "limit_bytes": 100_000_000},
    "predictions": {"predicted": {"history": 11, "knowledge": 24}, "dropped": 6, "given": 14, "served": 9, "given_per_question": 0.4},
    "background": {"predict": {"seconds": 74.2, "flops": 1e12}, "prepare": {"seconds": 31.0, "flops": 4e11}},
    "predicted_questions": [
        {"question": "What is the password of Glorric?", "origin": "knowledge", "dropped": None, "given": 3, "asked": False},
        {"question": "What is the access code of Brilton?", "origin": "knowledge", "dropped": None, "given": 0, "asked": True},
        {"question": "Which badge number does Hildmas have?", "origin": "history", "dropped": None, "given": 0, "asked": False},
        {"question": "When does the ferry to Yorkport leave?", "origin": "knowledge", "dropped": None, "given": 0, "asked": False},
        {"question": "Who painted the town hall?", "origin": "history", "dropped": "unanswerable", "given": 0, "asked": False},
    ],
    "recent": [
        {
            "at_s": 1_764_200_000 + 240 * step,
            "cache": "answer" if step % 5 == 4 or (step > 30 and step % 3 == 0) else "kv" if step else "miss",
            "prompt_tokens": 640,
            "cached_tokens": 0 if step % 5 == 4 else int(640 * min(0.93, 0.04 * step + 0.04 * (step % 3))),
            "ttft_s": 0.3,
        }
        for step in range(40)
    ],
}  # fmt: skip

SETTINGS: list[dict[str, Any]] = [
    {"name": "model", "default": None, "value": "google/gemma-3-270m-it", "help": "Hub id, local folder, GGUF file or hub/repo:QUANT. Default: the model the knowledge base was made with, else the shipped reference model."},
    {"name": "dtype", "default": "auto", "value": "auto", "help": "auto, float32, bfloat16 or float16."},
    {"name": "top_k", "default": 5, "value": 5, "help": "Number of chunks in front of a question."},
    {"name": "recipe", "default": "reuse", "value": "prophetkv", "help": "How stored KV is reused."},
    {"name": "ratio", "default": 0.2, "value": 0.2, "help": "Share of the stale tokens that is recomputed, 0..1."},
    {"name": "limit_bytes", "default": None, "value": None, "help": "Limit of KV on disk. Initially 10 % of the free space, up to 20 GB; kept afterwards."},
    {"name": "answer_threshold", "default": 0.85, "value": 0.85, "help": "Least cosine similarity of two questions that may share an answer, 0..1."},
    {"name": "answer_limit_bytes", "default": 100_000_000, "value": 100_000_000, "help": "Cap of the answer cache; 0 turns it off."},
    {"name": "port", "default": 8420, "value": 8420, "help": "Port to listen on; 0 takes a free one."},
]  # fmt: skip
