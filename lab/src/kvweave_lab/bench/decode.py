"""What a decoded token costs with the KV on flash: by strategy, budget, storage and length, in turn with dense decoding.

The KV is made up and filled in, since prefilling it would take the machine's day; it lies in groups that drift, as
keys do, so that clusters have sizes and neighbours. A model with random weights then decodes on it. That tells
cost alone: what random weights attend to says nothing about recall.
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
from kvweave.decode.settings import MEMORY_SHARE, OffloadSettings
from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import AppendableCache
from kvweave.models.fused_cache import FusedCache
from kvweave.types import Decoding, Storage
from kvweave_lab.bench.spread import Spread, ratios

WARM_UP = 4
"""Steps before a sample begins: the first ones find nothing in memory."""
ROUNDS = 8
"""How often texts take turns, if there are so many steps."""
DENSE = "dense"
"""Decoding on a canvas, with all KV in memory and the library's fused attention."""
_GROUPS, _DRIFT = 64, 0.02

Times = list[list[float]]
"""Seconds of each step of one text, by round."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One row of the report.

    `strategy` names a variant, see `decode.ablations`. `budget` None for dense; `decode_tokens` is the length decoded at,
    `steps` how many were timed. `of_dense`: time of a round's steps as a share of dense decoding's beside it.
    `growth_of_dense`: what a token takes longer than at the length before, as a share of what dense decoding's does. Both
    None without dense decoding, the second also at the shortest length, and where dense decoding's growth is lost in noise. `dense_kv_bytes` is what all KV takes at that length. `direct`: past the page cache.
    `resident_bound_bytes`: what was allowed. `decoding` None for dense. Per token: bytes written, read for splits alone, and written again only to make room.
    """

    strategy: str
    storage: Storage
    decode_tokens: int
    budget: float | None
    steps: int
    latency_s_per_token: Spread
    dense_kv_bytes: int
    of_dense: Spread | None = None
    growth_of_dense: Spread | None = None
    direct: bool = False
    resident_bound_bytes: int | None = None
    decoding: Decoding | None = None
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
    progress: Progress = lambda stage, done, total: None,
) -> list[DecodeCost]:
    """Rows for every length: dense first, then each of `settings`, a variant's name and what it is, with its files in `folder`.

    All lengths of one setting and dense decoding at each decode some steps in turn, so that shares of one another hold
    on a machine whose speed drifts; all are in memory together. Settings' `resident_bytes` bounds each text; None takes MEMORY_SHARE
    of all KV at its length. Without `dense` there is room for lengths whose whole KV memory does not hold.
    Raises InvalidRequest if a length and the steps do not fit the model's context, or memory is too little.
    """
    if steps < 1:
        raise InvalidRequest(f"steps is {steps}; at least 1 is needed")
    lengths = sorted(set(lengths))
    for length in lengths:
        adapter.check_length(length, WARM_UP + steps)
    kv_caches = [_kv_cache(adapter, length, seed) for length in lengths] if dense else []
    everywhere: list[Times] = [[] for _ in kv_caches]  # dense decoding's, beside all settings
    rows: list[DecodeCost] = []
    for count, (name, chosen) in enumerate(settings):
        progress("decoding", count, len(settings))
        with ExitStack() as files:
            held = [
                files.enter_context(_filled(adapter, replace(chosen, folder=folder), length, seed))
                for length in lengths
            ]
            beside, found = _measured(adapter, name, kv_caches, held, steps)
        rows += found
        for taken, more in zip(everywhere, beside, strict=True):
            taken += more
    if not settings:
        everywhere = _in_turn(adapter, kv_caches, [], steps)
    for kv_cache, taken in zip(kv_caches, everywhere, strict=True):
        rows.append(_dense_row(adapter, kv_cache, steps, taken))
    progress("decoding", len(settings), len(settings))
    return sorted(rows, key=lambda row: (row.decode_tokens, row.strategy != DENSE))


def made_up(adapter: Adapter, layer: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """One layer's keys and values (G, N, D): groups around centres that wander along the text."""
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


def _kv_cache(adapter: Adapter, length: int, seed: int) -> FusedCache:
    """A text of made up KV, all of it in memory."""
    kv_cache = adapter.new_cache(length)
    for index, layer in enumerate(kv_cache.layers):
        keys, values = (
            rows[None].to(adapter.geometry.device) for rows in made_up(adapter, index, length, seed)
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return kv_cache


def _filled(adapter: Adapter, settings: OffloadSettings, length: int, seed: int) -> OffloadedCache:
    """A text of the same KV, on flash; the caller closes it."""
    bound = settings.resident_bytes or int(MEMORY_SHARE * length * adapter.geometry.token_bytes)
    settings = replace(settings, resident_bytes=bound)
    held = OffloadedCache(adapter.geometry, settings, torch.arange(length))
    try:
        for index in range(adapter.geometry.layers):
            keys, values = made_up(adapter, index, length, seed)
            heads = adapter.model.config.get_text_config(decoder=True).num_attention_heads
            rows = torch.linspace(length // 2, length - 1, min(32, length)).long()
            queries = keys[:, rows].repeat_interleave(
                heads // keys.shape[0], 0
            )  # (H, T, D): like what is asked later
            held.fill(index, keys, values, queries, None)
    except BaseException:
        held.close()
        raise
    return held


def _measured(
    adapter: Adapter, name: str, kv_caches: Sequence[FusedCache], held: Sequence[OffloadedCache], steps: int
) -> tuple[list[Times], list[DecodeCost]]:
    """What dense decoding took on each canvas beside one setting's texts, and a row for each of those."""
    for text in held:
        _steps(adapter, text, _tokens(adapter, WARM_UP))
    before = [text.counts.copy() for text in held]
    times = _in_turn(adapter, kv_caches, held, steps)
    dense, own = times[: len(kv_caches)], times[len(kv_caches) :]
    rows = []
    for number, text in enumerate(held):
        row = _row(name, text, steps, own[number], text.counts.since(before[number]))
        rows.append(_beside(row, own, dense, number) if dense else row)
    return dense, rows


def _in_turn(
    adapter: Adapter, kv_caches: Sequence[FusedCache], held: Sequence[OffloadedCache], steps: int
) -> list[Times]:
    """Times of each text, canvases' first: some steps of one, of the next, and from the first again.

    Every text decodes the same tokens; canvases begin where their made up KV ends.
    """
    for kv_cache in kv_caches:
        kv_cache.shrink(kv_cache.length)
        _steps(adapter, kv_cache, _tokens(adapter, WARM_UP))
    tokens = _tokens(adapter, steps)
    rounds = min(ROUNDS, steps)
    some = [tokens[steps * number // rounds : steps * (number + 1) // rounds] for number in range(rounds)]
    texts: list[AppendableCache] = [*kv_caches, *held]
    found: list[Times] = [[] for _ in texts]
    for own in some:
        for text, times in zip(texts, found, strict=True):
            times.append(_steps(adapter, text, own))
    return found


def _steps(adapter: Adapter, text: AppendableCache, tokens: Sequence[int]) -> list[float]:
    """Seconds that each token takes."""
    taken = []
    for token in tokens:
        began = time.perf_counter()
        adapter.step(text, token)
        adapter.synchronize()
        taken.append(time.perf_counter() - began)
    return taken


def _tokens(adapter: Adapter, count: int) -> list[int]:
    """The same in every measurement of so many."""
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
        latency_s_per_token=Spread.of(chain.from_iterable(times)),
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
        latency_s_per_token=Spread.of(chain.from_iterable(times)),
        dense_kv_bytes=length * text.geometry.token_bytes,
        direct=text.parts.store.pages.file.direct,
        resident_bound_bytes=settings.resident_bytes,
        decoding=counts.per_token(),
        written_bytes_per_token=counts.bytes_written / steps,
        split_bytes_per_token=counts.split_bytes_read / steps,
        moved_bytes_per_token=counts.moved_bytes / steps,
    )


def _beside(row: DecodeCost, own: Sequence[Times], dense: Sequence[Times], number: int) -> DecodeCost:
    """The row of length `number` with what it is beside dense decoding, given both texts' times at every length."""
    ours, theirs = (list(map(_typical, times[: number + 1])) for times in (own, dense))
    growth = None
    if number:
        more, dense_more = (
            [long - short for short, long in zip(*pair[-2:], strict=True)] for pair in (ours, theirs)
        )
        growth = ratios(more, dense_more) if min(dense_more) > 0 else None
    return replace(row, of_dense=ratios(ours[-1], theirs[-1]), growth_of_dense=growth)


def _typical(times: Times) -> list[float]:
    """The median step of each round."""
    return [statistics.median(own) for own in times]
