"""Memory of requests over the same documents at the same time, with pages shared and with a private copy for each request."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.bench.serving.client import Call, Reply, run_in_turn, run_open_loop
from kvweave_lab.bench.serving.processes import MemoryWatch, ServerFailed
from kvweave_lab.bench.serving.systems import DEFAULT, NO_SHARE, System, SystemSettings, tokenizer_of
from kvweave_lab.bench.serving.traffic import Corpus, ServedRequest, ServedTraffic

REPLY_TOKENS = 256
"""Longest reply of a measured request: long enough that the first still runs when the last prompt is complete."""
_SETTLE_S = 1.0
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Makes glibc return freed blocks above 64 KiB to the system, so that memory of earlier requests does not hide any."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What a server's process grows by while requests over the same documents run.

    Attributes:
        system: `default` shares pages; `no-share` gives each request a private copy.
        requests: at a time.
        together: most requests that had their first token and not yet their last at the same moment.
        one_bytes: growth for a single request; the median of the rounds.
        all_bytes: growth for all at a time; the median of the rounds.
        prompt_tokens: of a request.
    """

    system: str
    requests: int
    together: int
    one_bytes: float
    all_bytes: float
    prompt_tokens: int


def bench_shared_memory(
    common: SystemSettings,
    traffic: ServedTraffic,
    requests: int,
    rounds: int,
    folder: Path,
    progress: Progress = no_progress,
) -> list[SharedMemory]:
    """Measure both ways, each on a server of its own, with everything stored before.

    The requests ask different questions over the same documents and arrive at the same moment. Memory is all that is
    resident, mapped pages of stored KV among it. Raises ServerFailed.
    """
    corpus = Corpus(tokenizer_of(common.model), traffic)
    documents = traffic.draw(1)[0].documents
    same = [ServedRequest(n, documents, f"Which room is named on day {n}?") for n in range(requests)]
    found = []
    for number, name in enumerate((DEFAULT, NO_SHARE)):
        system = System(name, common, corpus, folder, _GIVE_BACK)
        with system.server:
            system.start()
            found.append(_measure(system, [system.call(request, REPLY_TOKENS) for request in same], rounds))
        progress("memory", number + 1, 2)
    return found


def _measure(system: System, calls: Sequence[Call], rounds: int) -> SharedMemory:
    _answered(system, run_in_turn(system.server.url, calls[:2]))  # stores the documents, then reads them
    _grown(system, calls)  # what the process keeps from its first batch on is not the requests'
    single = [_grown(system, calls[:1])[0] for _ in range(rounds)]
    several = [_grown(system, calls) for _ in range(rounds)]
    replies = several[0][1]
    return SharedMemory(
        system.name,
        len(calls),
        max(_together(found) for _, found in several),
        statistics.median(single),
        statistics.median(grown for grown, _ in several),
        replies[0].prompt_tokens,
    )


def _grown(system: System, calls: Sequence[Call]) -> tuple[float, list[Reply]]:
    """Return by how much the process grew at most while it answered requests that arrived together."""
    time.sleep(_SETTLE_S)
    before = system.server.memory().resident
    with MemoryWatch(system.server.pid, 0.01) as memory:
        replies = run_open_loop(system.server.url, calls, [0.0] * len(calls))
    return float(memory.peak.resident - before), _answered(system, replies)


def _answered(system: System, replies: list[Reply]) -> list[Reply]:
    for reply in replies:
        if reply.outcome != "answered":
            raise ServerFailed(
                f"{system.name} did not answer one of the requests over the same documents: {reply.detail}"
            )
    return replies


def _together(replies: Sequence[Reply]) -> int:
    """Return the most requests that were being decoded at one moment."""
    starts = [reply.arrived_s + (reply.ttft_s or 0.0) for reply in replies]
    ends = [reply.arrived_s + reply.total_s for reply in replies]
    return max(
        sum(start <= moment < end for start, end in zip(starts, ends, strict=True)) for moment in starts
    )
