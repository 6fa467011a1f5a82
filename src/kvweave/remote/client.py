"""HTTP to a vLLM server: OpenAI's completions, whole or as a stream, and their errors as kvweave's."""

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from kvweave.errors import EngineError, EngineRefused, EngineUnavailable, InvalidRequest
from kvweave.remote.affinity import session_headers
from kvweave.remote.fields import FIELD

CONNECT_S: Final = 5.0
QUICK_S: Final = 30.0
"""How long a request may take that computes nothing."""
_POLL_S: Final = 0.1
_LINE_BYTES: Final = 10_000_000

Body = Mapping[str, Any]
Event = dict[str, Any]
Check = Callable[[], None]
"""Called at each line of a reply, and about ten times a second while none comes; what it raises ends the request."""


class VllmServer:
    """One vLLM server, or a router to several; threads may share it.

    The methods raise EngineUnavailable if it cannot be reached, has no room, fails, or dies before its reply ends; EngineRefused
    if it refuses the request; EngineError for any other reply, such as to a wrong key.

    Args:
        url: its address, with or without /v1.
        key: sent as a bearer token; None sends none.

    Attributes:
        model: the id of the model that requests name.
        running: how many requests of this process it answers now.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise InvalidRequest(
                f"{url!r} is no address of a vLLM server; write for example http://host:8000"
            )
        self.url, self._path = url, parts.path.rstrip("/").removesuffix("/v1")
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model, self.running = "", 0
        self._guard = threading.Lock()

    def models(self) -> list[str]:
        """Return the ids of the served models."""
        try:
            return [
                str(each["id"]) for each in self._whole("GET", "/v1/models", None, _within(QUICK_S))["data"]
            ]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.url} does not list its models as vLLM does") from error

    def complete(self, body: Body, check: Check | None = None) -> Event:
        """Return the whole reply to a request for a completion; without `check`, it may take QUICK_S."""
        asked = {**body, "model": self.model}
        return self._whole("POST", "/v1/completions", asked, check or _within(QUICK_S))

    def stream(self, body: Body, check: Check) -> Generator[Event, None, None]:
        """Yield the events of a streamed completion; closing the generator makes vLLM give the request up."""
        asked = {**body, "model": self.model}
        with closing(self._lines("POST", "/v1/completions", asked, check)) as lines:
            for line in lines:
                kind, _, data = line.partition(b":")
                if kind == b"data":
                    if data.strip() == b"[DONE]":
                        return
                    event = self._parsed(data)
                    if "error" in event:
                        raise EngineUnavailable(f"vLLM at {self.url} failed: {_error(event).get('message')}")
                    yield event
        raise EngineUnavailable(f"vLLM at {self.url} ended in the middle of its answer")

    def _whole(self, method: str, path: str, body: Body | None, check: Check) -> Event:
        with closing(self._lines(method, path, body, check)) as lines:
            return self._parsed(b"".join(lines))

    def _lines(self, method: str, path: str, body: Body | None, check: Check) -> Generator[bytes, None, None]:
        """Yield the lines of a reply as they come; raise for one that is no success."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_S)
        sent = None if body is None else json.dumps(body).encode()
        params, prompt = (body or {}).get("kv_transfer_params", {}), (body or {}).get("prompt", ())
        asked = (method, self._path + path, sent, self._headers | session_headers(params, prompt))
        items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._guard:
            self.running += 1
        sock = None
        try:
            connection.connect()
            sock = connection.sock
            sock.settimeout(None)  # a request may wait in vLLM's queue
            # In a thread: whoever waits for the reply can give it up at any time.
            threading.Thread(target=_read, args=(connection, asked, items), daemon=True).start()
            status = _next(items, check)
            lines = iter(lambda: _next(items, check), None)
            if status != HTTPStatus.OK:
                raise self._failure(status, b"".join(lines))
            yield from lines
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise EngineUnavailable(f"vLLM at {self.url} cannot be reached: {why}") from error
        finally:
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            with self._guard:
                self.running -= 1

    def _failure(self, status: int, text: bytes) -> Exception:
        """Return the error that a status stands for."""
        said: dict[str, Any] = {}
        with suppress(ValueError):
            said = _error(json.loads(text))
        message = said.get("message") or said.get("detail") or text.decode("utf-8", "replace").strip()[:300]
        field = said.get("param")
        if status in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY) and field != f"{FIELD}.model":
            return EngineRefused(f"vLLM refuses the request: {message}", field)
        busy = status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return (EngineUnavailable if busy else EngineError)(f"vLLM at {self.url} answers {status}: {message}")

    def _parsed(self, data: bytes) -> Event:
        event = None
        with suppress(ValueError):
            event = json.loads(data)
        if not isinstance(event, dict):
            raise EngineError(f"{self.url} does not answer as vLLM does: {data[:100]!r}")
        return event


def _error(said: Any) -> dict[str, Any]:
    found = said.get("error", said) if isinstance(said, dict) else {}
    return found if isinstance(found, dict) else {"message": str(found)}


def _within(seconds: float) -> Check:
    until_s = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > until_s:
            raise TimeoutError(f"no reply in {seconds:.0f} s")

    return check


def _read(connection: http.client.HTTPConnection, asked: tuple[Any, ...], items: Any) -> None:
    """Send a request; put the reply's status, its lines and None into a queue, or an error."""
    try:
        connection.request(*asked)
        with connection.getresponse() as response:
            items.put(response.status)
            while line := response.readline(_LINE_BYTES):
                items.put(line)
        items.put(None)
    except (OSError, http.client.HTTPException, ValueError) as error:
        items.put(error if isinstance(error, OSError) else OSError(str(error)))
    finally:
        connection.close()


def _next(items: Any, check: Check) -> Any:
    while True:
        check()
        with suppress(queue.Empty):
            item = items.get(timeout=_POLL_S)
            if isinstance(item, OSError):
                raise item
            return item
