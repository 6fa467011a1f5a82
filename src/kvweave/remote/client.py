"""HTTP to vLLM servers: OpenAI's completions as JSON and as a stream, and their errors as kvweave's."""

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from kvweave.errors import EngineError, EngineRefused, EngineUnavailable, InvalidRequest

CONNECT_S: Final = 5.0
QUICK_S: Final = 30.0
"""How long a request may take that computes nothing."""
_POLL_S: Final = 0.1
_MOST_BYTES: Final = 10_000_000
_OVERLOADED: Final = 429

Body = Mapping[str, Any]
Event = dict[str, Any]


class VllmServer:
    """One vLLM server, or a router to several; threads may share it.

    Args:
        url: its address, with or without /v1.
        key: sent as a bearer token; None sends none.

    Attributes:
        model: the id of the model that it serves.
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
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = ""
        self.running = 0
        self._guard = threading.Lock()

    def models(self) -> list[str]:
        """Return the ids of the served models. Raises EngineUnavailable, EngineError."""
        return [str(each["id"]) for each in self._whole("GET", "/v1/models", None, QUICK_S)["data"]]

    def complete(self, body: Body, check: Callable[[], None], most_s: float | None = None) -> Event:
        """Return the whole reply to a request for a completion; raises as `stream`."""
        return self._whole("POST", "/v1/completions", {**body, "model": self.model}, most_s, check)

    def stream(
        self, body: Body, headers: Mapping[str, str], check: Callable[[], None]
    ) -> Generator[Event, None, None]:
        """Yield the events of a streamed completion; closing the generator makes vLLM give the request up.

        `check` is called about ten times a second; what it raises ends the request.

        Raises:
            EngineUnavailable: the server cannot be reached, has no room, fails, or dies before its last event.
            EngineRefused: the request is at fault. EngineError: kvweave is, such as by a wrong key.
        """
        with closing(
            self._request("POST", "/v1/completions", {**body, "model": self.model}, headers)
        ) as reply:
            self._raise_for(reply.status(check), reply, check)
            for line in reply.parts(check):
                kind, _, data = line.partition(b":")
                if kind != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    return
                event = self._parsed(data)
                if "error" in event:
                    raise EngineUnavailable(f"vLLM at {self.url} failed: {_message(event)}")
                yield event
        raise EngineUnavailable(f"vLLM at {self.url} ended in the middle of its answer")

    def _whole(
        self,
        method: str,
        path: str,
        body: Body | None,
        most_s: float | None,
        check: Callable[[], None] = lambda: None,
    ) -> Event:
        until_s = None if most_s is None else time.monotonic() + most_s

        def look() -> None:
            check()
            if until_s is not None and time.monotonic() > until_s:
                raise EngineUnavailable(f"vLLM at {self.url} says nothing for {most_s:.0f} s")

        with closing(self._request(method, path, body, {})) as reply:
            self._raise_for(reply.status(look), reply, look)
            return self._parsed(b"".join(reply.parts(look)))

    def _request(self, method: str, path: str, body: Body | None, headers: Mapping[str, str]) -> "_Exchange":
        with self._guard:
            self.running += 1
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_S)
        asked = (
            method,
            self._path + path,
            None if body is None else json.dumps(body).encode(),
            {**self._headers, **headers},
        )
        return _Exchange(self.url, connection, asked, self._ended)

    def _ended(self) -> None:
        with self._guard:
            self.running -= 1

    def _raise_for(self, status: int, reply: "_Exchange", check: Callable[[], None]) -> None:
        """Raise the error that a status stands for."""
        if status == http.HTTPStatus.OK:
            return
        text = b"".join(reply.parts(check))
        try:
            said = json.loads(text)
        except ValueError:
            said = {}
        message = _message(said) or text.decode("utf-8", "replace").strip()[:300] or "without a word"
        if status in (http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNPROCESSABLE_ENTITY):
            raise EngineRefused(f"vLLM refuses the request: {message}", _field(said))
        if status == _OVERLOADED or status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise EngineUnavailable(f"vLLM at {self.url} answers {status}: {message}")
        raise EngineError(f"vLLM at {self.url} answers {status}: {message}")

    def _parsed(self, data: bytes) -> Event:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise EngineError(f"{self.url} does not answer as vLLM does: {data[:100]!r}")
        return event


def _error(said: object) -> dict[str, Any]:
    found = said.get("error", said) if isinstance(said, dict) else {}
    return found if isinstance(found, dict) else {"message": found}


def _message(said: object) -> str:
    return str(_error(said).get("message") or _error(said).get("detail") or "")


def _field(said: object) -> str | None:
    field = _error(said).get("param")
    return None if field is None else str(field)


@dataclass(frozen=True, slots=True)
class _Status:
    code: int


class _Exchange:
    """One request and its reply, read by a thread of its own, so that whoever waits for it can give up.

    Args:
        url: for messages.
        connection: not connected yet.
        asked: arguments of `connection.request`.
        ended: called once, when it is closed.
    """

    def __init__(
        self,
        url: str,
        connection: http.client.HTTPConnection,
        asked: tuple[str, str, bytes | None, dict[str, str]],
        ended: Callable[[], None],
    ) -> None:
        self._url, self._connection, self._asked, self._at_end = url, connection, asked, ended
        self._items: queue.SimpleQueue[_Status | bytes | Exception | None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._read, name="kvweave-vllm", daemon=True).start()

    def status(self, check: Callable[[], None]) -> int:
        """Return the reply's status; raises EngineUnavailable, and what `check` does."""
        item = self._next(check)
        assert isinstance(item, _Status)  # the thread puts it first
        return item.code

    def parts(self, check: Callable[[], None]) -> Iterator[bytes]:
        """Yield the lines of the reply; raises as `status`."""
        while (item := self._next(check)) is not None:
            assert isinstance(item, bytes)
            yield item

    def close(self) -> None:
        """End it: a server that still generates gives up."""
        if not self._closed:
            self._closed = True
            sock = self._connection.sock
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._at_end()

    def _next(self, check: Callable[[], None]) -> _Status | bytes | None:
        while True:
            try:
                item = self._items.get(timeout=_POLL_S)
            except queue.Empty:
                check()
                continue
            if isinstance(item, Exception):
                why = str(item) or type(item).__name__
                raise EngineUnavailable(f"vLLM at {self._url} cannot be reached: {why}") from item
            return item

    def _read(self) -> None:
        connection = self._connection
        try:
            connection.connect()
            if self._closed:
                return
            connection.sock.settimeout(None)  # a request may wait in vLLM's queue
            connection.request(*self._asked)
            with connection.getresponse() as response:
                self._items.put(_Status(response.status))
                left = _MOST_BYTES
                while left > 0 and not self._closed and (line := response.readline(_MOST_BYTES)):
                    self._items.put(line)
                    if response.status != http.HTTPStatus.OK:
                        left -= len(line)
            self._items.put(None)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._items.put(error)
        finally:
            connection.close()
