"""A client of servers with OpenAI's API: one streamed request, timed token by token, and many at given moments."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvweave_lab.bench.serving.processes import import_httpx

Outcome = Literal["answered", "refused", "failed"]
REFUSALS = (429, 503)
PATIENCE_S = 1800.0
"""How long a request may take; one that takes longer failed."""
_CONNECT_S = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """The path and the JSON body of a request."""

    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a request.

    Attributes:
        number: the request's.
        outcome: a whole answer, a clean refusal (429 or 503), or anything else.
        arrived_s: when it was due, from the beginning of the run. The client sends it then, or a little later if it is busy.
        ttft_s: from `arrived_s` to the first token; None without an answer.
        total_s: from `arrived_s` to the end.
        tpot_s: seconds per output token after the first one; None for fewer than two.
        prompt_tokens, cached_tokens, output_tokens: as the server counts them.
        detail: why it was refused or failed.
        retry_after: whether a refusal says when to try again.
        longest_gap_s: the longest time between two pieces of the answer that came one after the other; None for fewer than two.
    """

    number: int
    outcome: Outcome
    arrived_s: float
    ttft_s: float | None
    total_s: float
    tpot_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    detail: str = ""
    retry_after: bool = False
    longest_gap_s: float | None = None


class BrokenStream(Exception):
    """A stream of events that ends without its end marker, or that carries an error, of which `code` says the kind."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


async def events(lines: AsyncIterator[str], *, end_marker: bool = True) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each server-sent event until `[DONE]`; comments (pings) are skipped.

    Raises BrokenStream for an event that is an error, and for a missing `[DONE]` where an `end_marker` is expected.
    """
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            raise BrokenStream(f"the stream has an error: {json.dumps(error)[:200]}", error.get("code"))
        yield event
    if end_marker:
        raise BrokenStream("the stream ended without [DONE]")


async def timed_reply(client: Any, call: Call, number: int, due: float, began: float) -> Reply:
    """Send a request and time its streamed answer. Never raises: whatever goes wrong is an outcome.

    `due` and `began` are moments of time.perf_counter(): when the request arrives, and when the run began.
    """
    httpx = import_httpx()
    times = _Times(number, due, began)
    body = {**call.body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", call.path, json=body) as response:
            if response.status_code in REFUSALS:
                text = (await response.aread()).decode(errors="replace")
                return times.reply(
                    "refused", _short(response.status_code, text), "retry-after" in response.headers
                )
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return times.reply("failed", _short(response.status_code, text))
            async for event in events(response.aiter_lines()):
                times.record(event)
    except (httpx.HTTPError, OSError, BrokenStream, ValueError) as error:
        return times.reply("failed", f"{type(error).__name__}: {error}")
    return times.reply("answered") if times.finished else times.reply("failed", "no finish_reason came")


class _Times:
    """When the tokens of one reply came."""

    def __init__(self, number: int, due: float, began: float) -> None:
        self._number, self._due, self._began = number, due, began
        self._first = self._last = 0.0
        self._gap: float | None = None
        self._usage: dict[str, Any] = {}
        self.finished = False

    def record(self, event: Mapping[str, Any]) -> None:
        """Note an event of the stream."""
        now = time.perf_counter()
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            ends = choice.get("finish_reason") is not None
            if piece and self._last:
                self._gap = max(self._gap or 0.0, now - self._last)
            if piece or ends:
                self._first = self._first or now
                self._last = now if piece else self._last or now
            self.finished |= ends

    def reply(self, outcome: Outcome, detail: str = "", retry_after: bool = False) -> Reply:
        """Return the outcome of the request so far."""
        usage, now = self._usage, time.perf_counter()
        tokens = int(usage.get("completion_tokens", 0))
        answered = outcome == "answered"
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            number=self._number,
            outcome=outcome,
            arrived_s=self._due - self._began,
            ttft_s=self._first - self._due if answered else None,
            total_s=now - self._due,
            tpot_s=(self._last - self._first) / (tokens - 1) if answered and tokens > 1 else None,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens", 0)),
            output_tokens=tokens,
            detail=detail,
            retry_after=retry_after,
            longest_gap_s=self._gap if answered else None,
        )


def _short(status: int, text: str) -> str:
    return f"{status}: {' '.join(text.split())[:200]}"


def http_client(url: str, headers: Mapping[str, str] | None = None, *, keep_alive: bool = True) -> Any:
    """Return an asynchronous client with as many connections as requests; without `keep_alive`, one for each request."""
    httpx = import_httpx()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64 if keep_alive else 0)
    timeout = httpx.Timeout(PATIENCE_S, connect=_CONNECT_S)
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout)


def run_open_loop(
    url: str,
    calls: Sequence[Call],
    moments_s: Sequence[float],
    progress: Callable[[int], None] = lambda done: None,
) -> list[Reply]:
    """Send each request at its moment, whatever became of earlier ones; return the replies in the order of arrival."""

    async def run() -> list[Reply]:
        began, done = time.perf_counter(), 0

        async def send(client: Any, number: int) -> Reply:
            nonlocal done
            due = began + moments_s[number]
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            reply = await timed_reply(client, calls[number], number, due, began)
            done += 1
            progress(done)
            return reply

        async with http_client(url) as client:
            return await asyncio.gather(*(send(client, number) for number in range(len(calls))))

    return asyncio.run(run())


def run_in_turn(url: str, calls: Sequence[Call]) -> list[Reply]:
    """Send requests one after the other."""

    async def run() -> list[Reply]:
        began = time.perf_counter()
        async with http_client(url) as client:
            return [
                await timed_reply(client, call, number, time.perf_counter(), began)
                for number, call in enumerate(calls)
            ]

    return asyncio.run(run())
