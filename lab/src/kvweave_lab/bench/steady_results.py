"""What `kvweave bench steady` is asked for and what it finds: every question's times, and speed-up over time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvweave.errors import InvalidRequest
from kvweave_lab.bench.queries import Traffic


@dataclass(frozen=True, slots=True)
class SteadySettings:
    """What is measured: the questions of a traffic, one after the other, over a store that grows meanwhile.

    Attributes:
        traffic: which chunks questions retrieve, and which of these are there beforehand.
        recipe: its name.
        ratio: share of stale tokens recomputed.
        chunk_tokens: of every chunk.
        host_bytes: cap of the copies in the process's memory.
        full_every: full prefill is timed beside every so many-th question.
        page_cache: leave files in the page cache; otherwise every read that the host tier does not serve is one of the
            disk.
    """

    traffic: Traffic
    recipe: str = "prophetkv"
    ratio: float = 0.15
    chunk_tokens: int = 512
    host_bytes: int = 2 * 10**9
    full_every: int = 10
    page_cache: bool = False

    def __post_init__(self) -> None:
        if self.traffic.queries < 4:
            raise InvalidRequest(f"{self.traffic.queries} questions have no quarters; ask 4 or more")
        if self.full_every < 1:
            raise InvalidRequest(f"full_every is {self.full_every}; give 1 or more")


@dataclass(frozen=True, slots=True)
class SteadyRow:
    """One question. Times are in seconds.

    Attributes:
        question: its number, from 0.
        prompt_tokens: of the whole prompt.
        computed_tokens: of these, those computed, the question's among them.
        new_chunks: how many came with it and were prepared before it was asked.
        prepare_s: for all of them.
        ttft_s: from chunks known to the first token's logits: tokenizing, look-up, load, placement, selection,
            recomputation.
        full_s: full prefill from the same moment, where it was timed beside this question.
        load_s: looking stored KV up and mapping it.
        place_s: reading and verifying it, rotating it and laying it out.
        select_s: choosing tokens.
        recompute_s: the last pass.
        from_host: spans whose KV was in the process's memory.
        from_disk: spans whose KV was read from files.
        stored_bytes: of all files, afterwards.
        host_bytes: of all copies in memory, afterwards.
    """

    question: int
    prompt_tokens: int
    computed_tokens: int
    new_chunks: int
    prepare_s: float
    ttft_s: float
    full_s: float | None
    load_s: float
    place_s: float
    select_s: float
    recompute_s: float
    from_host: int
    from_disk: int
    stored_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class SteadyBench:
    """Everything that was measured.

    Attributes:
        settings: what was asked for.
        shape: the model's.
        dtype: of weights and KV.
        device: where it ran.
        memory_limit_bytes: what the system lets the process and its page cache have; None where it sets no limit.
        started_at: the questions before which a process started: 0, and where an interrupted measurement went on.
        rows: one for each question.
        speedups: of each question: full prefill, as it was timed nearest to it, over its own time.
        quarters: their medians over each quarter of the questions.
        kept: the last quarter's of the second's: 1 does not decay.
    """

    settings: SteadySettings
    shape: str
    dtype: str
    device: str
    memory_limit_bytes: int | None
    started_at: tuple[int, ...]
    rows: tuple[SteadyRow, ...]
    speedups: tuple[float, ...]
    quarters: tuple[float, ...]
    kept: float


def speedups(rows: Sequence[SteadyRow]) -> tuple[float, ...]:
    """Of each question; of two that full prefill was timed beside, equally near, the earlier counts."""
    timed = [(row.question, row.full_s) for row in rows if row.full_s is not None]
    nearest = (min(timed, key=lambda one: abs(one[0] - row.question))[1] for row in rows)
    return tuple(full_s / row.ttft_s for full_s, row in zip(nearest, rows, strict=True))


def quarters(values: Sequence[float]) -> tuple[float, ...]:
    """Medians of four equal parts, at least one value in each."""
    edges = [round(part * len(values) / 4) for part in range(5)]
    return tuple(statistics.median(values[start:end]) for start, end in pairwise(edges))
