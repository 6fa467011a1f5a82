"""What `kvweave bench ttft` is asked for and what it finds; `limit.py` says what the limit is."""

from dataclasses import dataclass
from typing import Literal, get_args

from kvweave_lab.bench.spread import Spread

Whence = Literal["memory", "disk"]
"""Where a request's stored KV comes from."""
WHENCE: tuple[Whence, ...] = get_args(Whence)


@dataclass(frozen=True, slots=True)
class TtftSettings:
    """What is measured: every recipe at every ratio over every context, `rounds` times.

    `kv_from` the disk drops stored KV from memory before a request, so that it is read and verified; named beside memory,
    each request is timed both ways.
    """

    context_tokens: tuple[int, ...]
    recipes: tuple[str, ...]
    ratios: tuple[float, ...]
    chunk_tokens: int = 512
    rounds: int = 5
    kv_from: tuple[Whence, ...] = ("memory",)


@dataclass(frozen=True, slots=True)
class TtftRow:
    """One recipe at one ratio over one context: medians of all rounds.

    Attributes:
        shape: the model's.
        dtype: of weights and KV.
        device: where it runs.
        threads: that PyTorch computes with.
        context_tokens: of all chunks together, as asked for.
        recipe: its name.
        ratio: share of stale tokens recomputed.
        kv_from: where stored KV was when the request began.
        rows: prompt tokens that were computed, the question's among them.
        full_s: full prefill, median of all times.
        ttft_s: from chunks known to the first token's logits.
        speedup: full prefill over ttft_s, each time the full prefills right before and after it.
        limit_speedup: full_s over the limit's time.
        efficiency: speedup / limit_speedup: 1 is a request that wastes nothing.
        load_s: looking up stored KV and mapping it.
        place_s: reading and verifying it where this process has not, rotating it to its places and laying it out.
        select_s: choosing tokens.
        recompute_s: the last pass.
        peak_bytes: memory at the peak beyond weights and stored KV; None where it is not known.
    """

    shape: str
    dtype: str
    device: str
    threads: int
    context_tokens: int
    recipe: str
    ratio: float
    kv_from: Whence
    rows: int
    full_s: float
    ttft_s: float
    speedup: float
    limit_speedup: float
    efficiency: float
    load_s: float
    place_s: float
    select_s: float
    recompute_s: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class TtftSpread:
    """How far the rounds of one row lie apart."""

    context_tokens: int
    recipe: str
    ratio: float
    kv_from: Whence
    ttft_s: Spread
    speedup: Spread


@dataclass(frozen=True, slots=True)
class FullPrefill:
    """Full prefill of one context.

    Attributes:
        context_tokens: as asked for.
        prompt_tokens: of the whole prompt.
        fastest: which of the ways in `ways_s` is the one that rows are compared with.
        ways_s: each way's seconds; those that are not the fastest are timed in the first two rounds only.
        gflops_per_s: what the fastest reaches.
        memory_bytes_per_s: measured beside it.
        read_bytes_per_s: of stored KV in memory, measured beside it.
        disk_bytes_per_s: of stored KV on the disk, measured beside it.
        peak_bytes: of the fastest, beyond the weights; None where it is not known.
    """

    context_tokens: int
    prompt_tokens: int
    fastest: str
    ways_s: dict[str, Spread]
    gflops_per_s: float
    memory_bytes_per_s: float
    read_bytes_per_s: float
    disk_bytes_per_s: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class TtftBench:
    """Everything that was measured."""

    settings: TtftSettings
    rows: tuple[TtftRow, ...]
    spreads: tuple[TtftSpread, ...]
    full: tuple[FullPrefill, ...]
