"""`kvweave bench decode`: the cost of a token decoded with KV on disk, by strategy, budget, storage and length.

The KV is synthetic, since prefilling long texts would take hours. Its keys form groups that drift along the text, as
real keys do, so that clusters have sizes and neighbours. A model with random weights decodes over it, in turn with dense
decoding. This measures cost only: attention of random weights has no meaningful recall.
"""

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from kvweave.decode.counters import DecodeCounts
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import AppendableCache
from kvweave.models.fused_cache import FusedCache
from kvweave.results import DecodeStats
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import Storage
from kvweave_lab.bench.measurement import MedianRange, paired_ratios
from kvweave_lab.strategies import MEMORY_SHARE, counts_since

WARM_UP = 4
"""Untimed steps at the beginning, which find nothing in memory."""
ROUNDS = 8
"""How many times texts take turns, unless there are fewer steps."""
DENSE = "dense"
"""Decoding over a `FusedCache`: all KV in memory, with transformers' fused attention."""
_GROUPS, _DRIFT = 64, 0.02

Times = list[list[float]]
"""Seconds of each step of one text, by round."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One row of the report.

    Attributes:
        strategy: name of a variant, see `eval.decoding.measure`.
        storage: of the KV on disk.
        decode_tokens: length of the text that is decoded at.
        budget: None for dense decoding.
        steps: number of timed steps.
        latency_s_per_token: of all timed steps.
        dense_kv_bytes: of all KV at this length.
        of_dense: time of a round's steps over dense decoding's in the same round; None without dense decoding.
        growth_of_dense: growth of a token's time since the next shorter length, over dense decoding's growth. None
            without dense decoding, at the shortest length, and where dense decoding's growth is below the noise.
        direct: whether reads bypass the page cache.
        resident_bound_bytes: limit of KV in memory.
        decoding: counts per token; None for dense decoding.
        written_bytes_per_token: bytes written.
        split_bytes_per_token: bytes read only for splitting clusters.
        moved_bytes_per_token: bytes written again only to make room.
    """

    strategy: str
    storage: Storage
    decode_tokens: int
    budget: float | None
    steps: int
    latency_s_per_token: MedianRange
    dense_kv_bytes: int
    of_dense: MedianRange | None = None
    growth_of_dense: MedianRange | None = None
    direct: bool = False
    resident_bound_bytes: int | None = None
    decoding: DecodeStats | None = None
    written_bytes_per_token: float = 0.0
    split_bytes_per_token: float = 0.0
    moved_bytes_per_token: float = 0.0


def bench_decode(
    adapter: Adapter,
    folder: Path,
    settings: Sequence[tuple[str, OffloadSettings]],
    lengths: Sequence[int],
    *,
    steps: int = 64,
    seed: int = 0,
    dense: bool = True,
    progress: Progress = no_progress,
) -> list[DecodeCost]:
    """Return rows for every length: dense decoding first, then each of `settings`, with its files in `folder`.

    `settings` are pairs of a variant's name and its settings. All lengths of one setting, and dense decoding at each of
    them, take turns every few steps, so that ratios hold on a machine whose speed drifts; all of them are in memory at
    the same time. `resident_bytes` of the settings limits each text; None takes MEMORY_SHARE of all KV at its length.
    Without `dense`, lengths are possible whose whole KV does not fit into memory. Raises InvalidRequest if a length and
    the steps do not fit the model's context, or if the memory limit is too small.
    """
    if steps < 1:
        raise InvalidRequest(f"steps is {steps}; at least 1 is needed")
    lengths = sorted(set(lengths))
    for length in lengths:
        adapter.check_length(length, WARM_UP + steps)
    kv_caches = [_dense_text(adapter, length, seed) for length in lengths] if dense else []
    dense_times: list[Times] = [[] for _ in kv_caches]  # dense decoding, over all settings
    rows: list[DecodeCost] = []
    for count, (name, chosen) in enumerate(settings):
        progress("decoding", count, len(settings))
        with ExitStack() as files:
            offloaded = [
                files.enter_context(_offloaded_text(adapter, replace(chosen, folder=folder), length, seed))
                for length in lengths
            ]
            more_dense_times, found = _measure(adapter, name, kv_caches, offloaded, steps)
        rows += found
        for taken, more in zip(dense_times, more_dense_times, strict=True):
            taken += more
    if not settings:
        dense_times = _take_turns(adapter, kv_caches, [], steps)
    for kv_cache, taken in zip(kv_caches, dense_times, strict=True):
        rows.append(_dense_row(adapter, kv_cache, steps, taken))
    progress("decoding", len(settings), len(settings))
    return sorted(rows, key=lambda row: (row.decode_tokens, row.strategy != DENSE))


def synthetic_kv(adapter: Adapter, layer: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return one layer's keys and values (G, N, D), in groups around centres that drift along the text."""
    g = adapter.geometry
    random = torch.Generator().manual_seed(seed * 1000 + layer)
    centres = torch.randn(_GROUPS, g.kv_heads, g.head_width, generator=random) * 2
    moves = torch.randn(_GROUPS, g.kv_heads, g.head_width, generator=random) * _DRIFT
    which = torch.randint(0, _GROUPS, (length,), generator=random)
    when = torch.arange(length).sqrt()[:, None, None]
    keys = (
        centres[which] + moves[which] * when + torch.randn(length, g.kv_heads, g.head_width, generator=random)
    )
    values = torch.randn(length, g.kv_heads, g.head_width, generator=random)
    return keys.transpose(0, 1).to(g.dtype), values.transpose(0, 1).to(g.dtype)


def _dense_text(adapter: Adapter, length: int, seed: int) -> FusedCache:
    """Return a text of synthetic KV, all of it in memory."""
    kv_cache = adapter.new_cache(length)
    for index, layer in enumerate(kv_cache.layers):
        keys, values = (
            rows[None].to(adapter.geometry.device) for rows in synthetic_kv(adapter, index, length, seed)
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return kv_cache


def _offloaded_text(adapter: Adapter, settings: OffloadSettings, length: int, seed: int) -> OffloadedCache:
    """Return a text of the same KV on disk; the caller closes it."""
    bound = settings.resident_bytes or int(MEMORY_SHARE * length * adapter.geometry.token_bytes)
    settings = replace(settings, resident_bytes=bound)
    offloaded = OffloadedCache(adapter.geometry, settings, torch.arange(length))
    try:
        for index in range(adapter.geometry.layers):
            keys, values = synthetic_kv(adapter, index, length, seed)
            heads = adapter.model.config.get_text_config(decoder=True).num_attention_heads
            rows = torch.linspace(length // 2, length - 1, min(32, length)).long()
            queries = keys[:, rows].repeat_interleave(
                heads // keys.shape[0], 0
            )  # (H, T, D): similar to later queries
            offloaded.fill(index, keys, values, queries, None)
    except BaseException:
        offloaded.close()
        raise
    return offloaded


def _measure(
    adapter: Adapter,
    name: str,
    kv_caches: Sequence[FusedCache],
    offloaded: Sequence[OffloadedCache],
    steps: int,
) -> tuple[list[Times], list[DecodeCost]]:
    """Time one setting's texts in turn with dense decoding; return dense decoding's times and the setting's rows."""
    for text in offloaded:
        _steps(adapter, text, _tokens(adapter, WARM_UP))
    before = [replace(text.counts) for text in offloaded]
    times = _take_turns(adapter, kv_caches, offloaded, steps)
    dense, own = times[: len(kv_caches)], times[len(kv_caches) :]
    rows = []
    for number, text in enumerate(offloaded):
        row = _row(name, text, steps, own[number], counts_since(before[number], text.counts))
        rows.append(_compared(row, own, dense, number) if dense else row)
    return dense, rows


def _take_turns(
    adapter: Adapter, kv_caches: Sequence[FusedCache], offloaded: Sequence[OffloadedCache], steps: int
) -> list[Times]:
    """Return the times of each text, dense ones first; texts take turns every few steps.

    Every text decodes the same tokens. Dense texts start at the end of their synthetic KV.
    """
    for kv_cache in kv_caches:
        kv_cache.truncate_appended(kv_cache.length)
        _steps(adapter, kv_cache, _tokens(adapter, WARM_UP))
    tokens = _tokens(adapter, steps)
    rounds = min(ROUNDS, steps)
    some = [tokens[steps * number // rounds : steps * (number + 1) // rounds] for number in range(rounds)]
    texts: list[AppendableCache] = [*kv_caches, *offloaded]
    found: list[Times] = [[] for _ in texts]
    for own in some:
        for text, times in zip(texts, found, strict=True):
            times.append(_steps(adapter, text, own))
    return found


def _steps(adapter: Adapter, text: AppendableCache, tokens: Sequence[int]) -> list[float]:
    """Decode tokens and return the seconds of each."""
    taken = []
    for token in tokens:
        began = time.perf_counter()
        adapter.step(text, token)
        adapter.synchronize()
        taken.append(time.perf_counter() - began)
    return taken


def _tokens(adapter: Adapter, count: int) -> list[int]:
    """Return random tokens; equal counts give equal tokens."""
    random = torch.Generator().manual_seed(count)
    vocabulary = adapter.model.config.get_text_config(decoder=True).vocab_size
    drawn: list[int] = torch.randint(0, vocabulary, (count,), generator=random).tolist()
    return drawn


def _dense_row(adapter: Adapter, kv_cache: FusedCache, steps: int, times: Times) -> DecodeCost:
    return DecodeCost(
        strategy=DENSE,
        storage="exact",
        decode_tokens=kv_cache.length,
        budget=None,
        steps=steps,
        latency_s_per_token=MedianRange.of(chain.from_iterable(times)),
        dense_kv_bytes=kv_cache.length * adapter.geometry.token_bytes,
    )


def _row(name: str, text: OffloadedCache, steps: int, times: Times, counts: DecodeCounts) -> DecodeCost:
    settings, length = text.settings, text.positions.numel()
    return DecodeCost(
        strategy=name,
        storage=settings.storage,
        decode_tokens=length,
        budget=settings.kv_budget,
        steps=steps,
        latency_s_per_token=MedianRange.of(chain.from_iterable(times)),
        dense_kv_bytes=length * text.geometry.token_bytes,
        direct=text.shared.store.pages.file.direct,
        resident_bound_bytes=settings.resident_bytes,
        decoding=counts.per_token(),
        written_bytes_per_token=counts.bytes_written / steps,
        split_bytes_per_token=getattr(counts, "split_bytes_read", 0) / steps,
        moved_bytes_per_token=getattr(counts, "moved_bytes", 0) / steps,
    )


def _compared(row: DecodeCost, own: Sequence[Times], dense: Sequence[Times], number: int) -> DecodeCost:
    """Return the row of length `number` compared with dense decoding, given both texts' times at every length."""
    decoded, baseline = (list(map(_round_medians, times[: number + 1])) for times in (own, dense))
    growth = None
    if number:
        more, dense_more = (
            [long - short for short, long in zip(*pair[-2:], strict=True)] for pair in (decoded, baseline)
        )
        growth = paired_ratios(more, dense_more) if min(dense_more) > 0 else None
    return replace(row, of_dense=paired_ratios(decoded[-1], baseline[-1]), growth_of_dense=growth)


def _round_medians(times: Times) -> list[float]:
    """Return the median step of each round."""
    return [statistics.median(own) for own in times]
