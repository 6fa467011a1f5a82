"""A client for a running server: sends questions to its knowledge bases and streams the answers.

It imports only the standard library, so that a command which asks a running server starts fast.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, urlsplit

from kvweave.cancellation import check_cancelled
from kvweave.errors import InvalidRequest, ServerBusy, ServerRefused, ServerUnavailable
from kvweave.results import Answer, ExplainedToken, answer_from, tokens_from

CONNECT_S: Final = 2.0
SILENCE_S: Final = 60.0
"""Seconds without a byte after which the client gives a server up. A server that computes sends a ping every few seconds."""
BUSY_S: Final = 30.0
"""Seconds for which a request waits, in total, while the server is busy."""
_MOST_WAIT_S: Final = 5.0


class ServerClient:
    """A connection to the server at `url`, for one request at a time. A context manager.

    Every call raises ServerUnavailable if the server does not respond, ServerBusy if it stays busy for `busy_s` seconds, and
    ServerRefused, with the server's message, if it refuses the request.
    """

    def __init__(self, url: str, key: str | None = None, *, busy_s: float = BUSY_S) -> None:
        self.url = url.rstrip("/")
        self._key, self._busy_s = key, busy_s
        address = urlsplit(self.url)
        if address.scheme != "http" or not address.hostname:
            raise InvalidRequest(
                f"{url!r} is not the address of a server; write for example http://127.0.0.1:8420"
            )
        self._connection = http.client.HTTPConnection(address.hostname, address.port or 80, timeout=CONNECT_S)

    def settings(self) -> dict[str, Any]:
        """Return the server's settings by name."""
        return {each["name"]: each["value"] for each in self._call("GET", "/v1/settings")["data"]}

    def knowledge_bases(self) -> list[dict[str, Any]]:
        """Return name, documents, chunks and bytes of each knowledge base."""
        listed: list[dict[str, Any]] = self._call("GET", "/v1/kb")["data"]
        return listed

    def documents(self, kb: str) -> list[dict[str, Any]]:
        """Return source, title, chunks and tokens of each document of a knowledge base."""
        listed: list[dict[str, Any]] = self._call("GET", _kb_path(kb))["documents"]
        return listed

    def prepares(self, kb: str) -> bool:
        """Return whether the server prepares the remaining chunks of a knowledge base. This call makes it open the knowledge base."""
        found = self._call("GET", _kb_path(kb)).get("preparation")
        return isinstance(found, dict) and found.get("by_server") is True

    def search(self, kb: str, question: str, top_k: int | None) -> list[dict[str, Any]]:
        """Return document, start, end, text and score of the passages for a question, best first."""
        found: list[dict[str, Any]] = self._call(
            "POST", _kb_path(kb, "search"), {"question": _valid(question), "top_k": top_k}
        )["data"]
        return found

    def ask(
        self, kb: str, question: str, options: Mapping[str, Any], show: Callable[[str], object]
    ) -> tuple[Answer, tuple[ExplainedToken, ...]]:
        """Ask a question, and call `show` with each piece of the answer; return it with the tokens of its prompt if `explain` is set.

        `options` are options of `KnowledgeBase.stream`, settings for this request, and `explain`.
        """
        body = {"question": _valid(question), "stream": True, **options}
        done: Any = None
        for kind, data in self.events(_kb_path(kb, "ask"), body):
            if kind == "piece":
                show(data["text"])
            done = data
        try:
            return answer_from({"text": done["answer"], **done}), tokens_from(done.get("tokens") or ())
        except (KeyError, TypeError, ValueError) as error:
            raise ServerUnavailable(
                f"the server sent an answer that cannot be read ({error!r}); check that it has the same version of kvweave"
            ) from error

    def send(self, kb: str, conversation: str, question: str, top_k: int | None) -> Iterator[str]:
        """Yield the answer to a conversation's next turn, piece by piece."""
        path = _kb_path(kb, "conversations", conversation)
        for kind, data in self.events(path, {"question": _valid(question), "top_k": top_k, "stream": True}):
            if kind == "piece":
                yield data["text"]

    def start_over(self, kb: str, conversation: str) -> None:
        self._call("DELETE", _kb_path(kb, "conversations", conversation))

    def events(self, path: str, body: Any) -> Iterator[tuple[str, Any]]:
        """Yield kind and parsed data of a request's server-sent events, without pings.

        Raises ServerUnavailable if the stream ends before its event `done`.
        """
        response = self._respond("POST", path, body, "text/event-stream")
        kind, data = "message", list[str]()
        while True:
            check_cancelled()
            line = self._read_line(response)
            if line.startswith("event:"):
                kind = line[6:].strip()
            elif line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
            elif not line and data:
                parsed = _parsed("\n".join(data))
                if kind == "error":
                    raise ServerRefused(_message(parsed), status=500)
                yield kind, parsed
                if kind == "done":
                    with suppress(OSError, http.client.HTTPException):
                        response.read()
                    return
                kind, data = "message", []

    def close(self) -> None:
        """Close the connection. The server then ends a running request."""
        self._connection.close()

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self._respond(method, path, body, "application/json")
        try:
            return _parsed(response.read().decode("utf-8", "replace"))
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error

    def _respond(self, method: str, path: str, body: Any, accept: str) -> http.client.HTTPResponse:
        """Send a request and return the response when it begins. While the server is busy, wait and send again."""
        until = time.monotonic() + self._busy_s
        while True:
            response = self._send(method, path, body, accept)
            if response.status < 400:
                return response
            refused = self._refused(response)
            wait_s = min(_MOST_WAIT_S, _number(response.headers.get("Retry-After"), 1.0))
            if response.status != 429:
                raise refused
            if time.monotonic() + wait_s > until:
                raise ServerBusy(
                    f"the server at {self.url} is busy ({refused}); try again later, or --no-server"
                )
            time.sleep(wait_s)
            check_cancelled()

    def _send(self, method: str, path: str, body: Any, accept: str) -> http.client.HTTPResponse:
        headers = {"Accept": accept} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        encoded = None
        if body is not None:
            encoded = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            if self._connection.sock is None:
                self._connection.timeout = CONNECT_S
                self._connection.connect()
            self._connection.sock.settimeout(SILENCE_S)
            self._connection.request(method, path, encoded, headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error

    def _read_line(self, response: http.client.HTTPResponse) -> str:
        try:
            line = response.readline()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._gone(error) from error
        if not line:
            raise self._gone(EOFError("the stream ended"))
        return line.decode("utf-8", "replace").rstrip("\r\n")

    def _refused(self, response: http.client.HTTPResponse) -> ServerRefused:
        try:
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from error
        with suppress(ServerUnavailable):
            return ServerRefused(_message(_parsed(text)), status=response.status)
        return ServerRefused(f"{response.status} {response.reason}", status=response.status)

    def _gone(self, error: Exception) -> ServerUnavailable:
        self.close()
        why = f"{error}" or type(error).__name__
        return ServerUnavailable(f"the server at {self.url} does not respond ({why})")


def _kb_path(kb: str, *rest: str) -> str:
    return "/".join(["/v1/kb", *(quote(part, safe="") for part in (kb, *rest))])


def _valid(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")  # a terminal may pass invalid bytes


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerUnavailable(
            f"the server sent {text[:80]!r}, which is not JSON; check that it is a kvweave server"
        ) from error


def _message(body: Any) -> str:
    """Return the message of an error in the API's shape, or the text of any other body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _number(text: str | None, default: float) -> float:
    try:
        return max(0.0, float(text)) if text is not None else default
    except ValueError:
        return default
