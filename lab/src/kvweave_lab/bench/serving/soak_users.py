"""Users of a soak: each asks, uploads, deletes and leaves at random, one request after the other, until it is told to stop."""

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from kvweave_lab.bench.serving.client import PATIENCE_S, REFUSALS, BrokenStream, events
from kvweave_lab.bench.serving.processes import ServerFailed, import_httpx
from kvweave_lab.bench.serving.soak_ledger import Ledger

Outcome = Literal["answered", "refused", "stopped", "left", "interrupted", "failed"]
Mode = Literal["up", "stopping", "down"]
STAGES: Final = ("headers", "body", "queued", "first", "middle")
"""Where a user leaves: within the headers, within the body, after the request, after the first bytes, after some more."""
_MOST_DOCUMENTS = 8
_ROOMS = ("cedar", "walnut", "maple", "birch", "linden", "poplar")


@dataclass(slots=True)
class SoakState:
    """What users share.

    Attributes:
        url: of the server.
        model: its name for requests.
        texts: documents that requests bring along.
        ledger: what was acknowledged.
        counts: outcomes by action.
        waits_s: seconds until each answer was complete, by action.
        failures: the first requests that were lost, and when.
        mode: whether the server runs, is asked to end, or was killed. It decides what a broken connection means.
        up: set while users may send requests.
        stop: set when they shall end.
        refused_without_time: refusals that do not say when to try again.
    """

    url: str
    model: str
    texts: tuple[str, ...]
    new_tokens: int
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counter[tuple[str, Outcome]] = field(default_factory=Counter)
    waits_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: list[str] = field(default_factory=list)
    mode: Mode = "up"
    up: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    refused_without_time: int = 0

    def record(self, action: str, outcome: Outcome, detail: str = "") -> None:
        """Count what came of a request."""
        self.counts[action, outcome] += 1
        if outcome == "failed" and len(self.failures) < 20:
            self.failures.append(f"{action}: {detail}")


class User:
    """One user. It has a knowledge base of its own, so that only its own requests change what is in there."""

    def __init__(self, number: int, state: SoakState, client: Any, seed: int) -> None:
        self.base = f"soak-{number}"
        self._state, self._client = state, client
        self._random = random.Random(f"{seed}/{number}")
        self._documents: list[str] = []
        self._uploads = 0
        self._actions: list[tuple[float, str, Callable[[], Awaitable[Outcome]]]] = [
            (3, "chat", lambda: self._complete(stream=False)),
            (3, "chat, streamed", lambda: self._complete(stream=True)),
            (3, "documents", lambda: self._complete(stream=False, documents=True)),
            (3, "documents, streamed", lambda: self._complete(stream=True, documents=True)),
            (3, "ask", lambda: self._ask(stream=False)),
            (2, "ask, streamed", lambda: self._ask(stream=True)),
            (1.5, "upload", self._upload),
            (1.5, "delete", self._delete),
            (0.5, "create and delete a knowledge base", self._short_lived),
            (1, "list", self._list),
            (3, "leave", self._leave),
        ]

    async def prepare(self) -> None:
        """Create the user's knowledge base, with a document that stays and some of those that come and go.

        So there is always one to ask about, and uploads and deletions are in balance from the beginning: knowledge bases that grow
        would take more memory rightly.
        """
        created = await self._client.post("/v1/kb", json={"name": self.base})
        created.raise_for_status()
        for count in range(1 + _MOST_DOCUMENTS // 2):
            while await self._upload() == "refused":
                await asyncio.sleep(1)
            if not self._documents:
                raise ServerFailed(f"{self.base} has no document; its upload was refused")
            if not count:
                self._documents.clear()

    async def run(self) -> None:
        """Send requests until the user is stopped. Never raises because of the server's behaviour."""
        weights = [weight for weight, _, _ in self._actions]
        while not self._state.stop.is_set():
            await self._state.up.wait()
            _, name, act = self._random.choices(self._actions, weights)[0]
            outcome = await self.outcome(name, act)
            await asyncio.sleep(0.2 if outcome in ("refused", "stopped") else self._random.uniform(0, 0.02))

    async def outcome(self, name: str, act: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Send one request and return how it ended; what should not happen is noted."""
        httpx = import_httpx()
        sent, began, detail = self._state.mode, time.monotonic(), ""
        try:
            outcome = await act()
            if outcome == "refused" and self._state.mode == "stopping":
                outcome = "stopped"
        except (httpx.TransportError, OSError) as error:
            never_open = isinstance(error, httpx.ConnectError | ConnectionRefusedError)
            outcome, detail = self._broken_connection(sent, never_open), repr(error)
        except (httpx.HTTPError, BrokenStream, ValueError, KeyError) as error:
            outcome, detail = self._broken_reply(error), repr(error)
        seconds = time.monotonic() - began
        if outcome == "answered":
            self._state.waits_s[name].append(seconds)
        told = f"after {seconds:.1f} s, sent while {sent}, broken while {self._state.mode}: {detail}"
        self._state.record(name, outcome, told)
        return outcome

    def _broken_connection(self, sent: Mode, never_open: bool) -> Outcome:
        """Return the outcome of a request whose connection broke, by the state of the server when it was sent.

        A server that was killed meanwhile interrupts it. One that is about to end may refuse what is sent from then on by closing
        the connection, but must not leave without a word what was sent before. A connection that it does not accept any more
        tells the client that nothing was sent.
        """
        if self._state.mode == "down":
            return "interrupted"
        stopped = sent == "stopping" or (never_open and self._state.mode == "stopping")
        return "stopped" if stopped else "failed"

    def _broken_reply(self, error: Exception) -> Outcome:
        """Return the outcome of an incomplete reply: a server that is about to end may cancel it, and has to say so."""
        if self._state.mode == "down":
            return "interrupted"
        cancelled = isinstance(error, BrokenStream) and error.code == "cancelled"
        return "stopped" if cancelled and self._state.mode == "stopping" else "failed"

    # Actions

    async def _complete(self, *, stream: bool, documents: bool = False) -> Outcome:
        body = {**self._chat(documents=documents), "stream": stream}
        return await self._answer("/v1/chat/completions", body, _openai_end)

    async def _ask(self, *, stream: bool) -> Outcome:
        question = f"Which room is {self._random.choice(_ROOMS)}, number {self._random.randrange(40)}?"
        body = {"question": question, "stream": stream, "max_new_tokens": self._state.new_tokens}
        return await self._answer(f"/v1/kb/{self.base}/ask", body, _ask_end)

    async def _upload(self) -> Outcome:
        if len(self._documents) >= _MOST_DOCUMENTS:
            return await self._delete()
        self._uploads += 1
        name = f"{self.base}-{self._uploads}.txt"
        room = self._random.choice(_ROOMS)
        text = f"Document {name}. The room {room} has number {self._uploads}. " * self._random.randrange(
            1, 12
        )
        self._state.ledger.changing(self.base, name)
        response = await self._client.post(
            f"/v1/kb/{self.base}/documents", files=[("files", (name, text.encode(), "text/plain"))]
        )
        outcome = self._status(response)
        if outcome == "answered":
            if name not in response.json()["added"]:
                raise BrokenStream(f"{name} was accepted and not added: {response.text[:200]}")
            self._state.ledger.added(self.base, name)
            self._documents.append(name)
        return outcome

    async def _delete(self) -> Outcome:
        if not self._documents:
            return await self._upload()
        name = self._documents.pop(self._random.randrange(len(self._documents)))
        listed = await self._client.get(f"/v1/kb/{self.base}")
        outcome = self._status(listed)
        if outcome != "answered":
            self._documents.append(name)
            return outcome
        sources = [one["source"] for one in listed.json()["documents"] if one["source"].endswith(name)]
        if not sources:
            raise BrokenStream(f"{name} was acknowledged and is not listed")
        self._state.ledger.changing(self.base, name)
        outcome = self._status(
            await self._client.delete(f"/v1/kb/{self.base}/documents", params={"source": sources[0]})
        )
        if outcome == "answered":
            self._state.ledger.deleted(self.base, name)
        return outcome

    async def _short_lived(self) -> Outcome:
        """Create a knowledge base, put a document into it, and delete it."""
        self._uploads += 1
        name = f"{self.base}-short-{self._uploads}"
        outcome = self._status(await self._client.post("/v1/kb", json={"name": name}))
        if outcome != "answered":
            return outcome
        files = [("files", ("note.txt", b"The room cedar has number 7.", "text/plain"))]
        added = self._status(await self._client.post(f"/v1/kb/{name}/documents", files=files))
        outcome = self._status(await self._client.delete(f"/v1/kb/{name}"))
        return outcome if added == "answered" else added

    async def _list(self) -> Outcome:
        paths = (
            "/v1/kb",
            f"/v1/kb/{self.base}",
            f"/v1/kb/{self.base}/caches",
            "/v1/models",
            "/metrics",
            "/health",
        )
        return self._status(await self._client.get(self._random.choice(paths)))

    async def _leave(self) -> Outcome:
        """Send a request and close the connection somewhere on its way."""
        stage = self._random.choice(STAGES)
        body = json.dumps({**self._chat(documents=self._random.random() < 0.5), "stream": True}).encode()
        host = urlsplit(self._state.url).netloc
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        try:
            await leave_at(self._state.url, stage, head, body, self._random)
        except ConnectionResetError:  # the server ends, and need not wait for who does not stay either
            if self._state.mode == "up":
                raise
        return "left"

    # Replies

    async def _answer(self, path: str, body: Any, whole: Callable[[Any], bool]) -> Outcome:
        """Send a request and read all of its answer; `whole` tells from the reply, or its last event, that it is one."""
        if not body["stream"]:
            response = await self._client.post(path, json=body)
            outcome = self._status(response)
            if outcome == "answered" and not whole(response.json()):
                raise BrokenStream(f"no whole answer: {response.text[:200]}")
            return outcome
        async with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._status(response)
            last, ended = None, False
            async for event in events(response.aiter_lines(), end_marker=not path.endswith("/ask")):
                last = event
                ended |= whole(event)
            if not ended:
                raise BrokenStream(f"the stream ended before the answer did: {json.dumps(last)[:200]}")
            return "answered"

    def _status(self, response: Any) -> Outcome:
        if response.status_code in REFUSALS:
            self._state.refused_without_time += "retry-after" not in response.headers
            return "refused"
        if response.status_code >= 400:
            raise BrokenStream(f"{response.status_code}: {response.text[:200]}")
        return "answered"

    def _chat(self, *, documents: bool) -> dict[str, Any]:
        number = self._random.randrange(1000)
        message = {"role": "user", "content": f"Which room has number {number}? Name the room of {number}."}
        body: dict[str, Any] = {
            "model": self._state.model,
            "messages": [message],
            "max_tokens": self._state.new_tokens,
            "temperature": self._random.choice((0, 0, 0.7)),
        }
        if documents:
            texts = self._random.sample(self._state.texts, k=min(3, len(self._state.texts)))
            body["documents"] = [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]
        return body


async def leave_at(url: str, stage: str, head: bytes, body: bytes, choices: random.Random) -> None:
    """Open a connection, send a request up to a stage, and close it without a word. Raises OSError if none opens."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        if stage == "headers":
            writer.write(head[: choices.randrange(1, len(head))])
        elif stage == "body":
            writer.write(head + body[: choices.randrange(0, len(body))])
        else:
            writer.write(head + body)
        await writer.drain()
        if stage in ("first", "middle"):
            await asyncio.wait_for(reader.read(1), PATIENCE_S)
        if stage == "middle":
            await asyncio.wait_for(reader.read(choices.randrange(50, 2000)), PATIENCE_S)
        else:
            await asyncio.sleep(choices.uniform(0, 0.2))
    finally:
        writer.transport.abort()  # without a word, as a client that is killed does


def _openai_end(reply: Any) -> bool:
    choices = reply.get("choices") or ()
    return any(choice.get("finish_reason") is not None for choice in choices)


def _ask_end(reply: Any) -> bool:
    return "answer" in reply and "timing" in reply
