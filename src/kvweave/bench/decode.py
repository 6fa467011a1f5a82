"""What a decoded token costs with the KV on flash: by strategy, length, budget and storage, beside dense decoding.

The KV is made up and filled in, since prefilling it would take the machine's day; it lies in groups that drift, as
keys do, so that clusters have sizes and neighbours. A model with random weights then decodes on it. That tells
cost alone: what random weights attend to says nothing about recall.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvweave.bench.spread import Spread
from kvweave.core import Decoding, Storage
from kvweave.decode.retrieved_kv import RetrievedKV
from kvweave.decode.settings import ClusteredKV
from kvweave.engine.records import Progress
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.continued import Continued

WARM_UP = 4
"""Steps before a sample begins: the first ones find nothing in memory."""
DENSE = "dense"
"""Decoding on a canvas, with all KV in memory and the library's fused attention."""
_GROUPS, _DRIFT = 64, 0.02


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """One row of the report.

    `strategy` names a variant, see `decode.ablations`. `budget` None for dense; `decode_tokens` is the length decoded at,
    `steps` how many were timed. `dense_kv_bytes` is what all KV takes at that length. `direct`: past the page cache.
    `resident_bound_bytes`: what was allowed. `decoding` None for dense. Per token: bytes written, read for splits alone, and written again only to make room.
    """

    strategy: str
    storage: Storage
    decode_tokens: int
    budget: float | None
    steps: int
    latency_s_per_token: Spread
    dense_kv_bytes: int
    direct: bool = False
    resident_bound_bytes: int | None = None
    decoding: Decoding | None = None
    written_bytes_per_token: float = 0.0
    split_bytes_per_token: float = 0.0
    moved_bytes_per_token: float = 0.0


def bench_decode(
    adapter: Adapter,
    folder: Path,
    settings: Sequence[tuple[str, ClusteredKV]],
    lengths: list[int],
    *,
    steps: int = 64,
    seed: int = 0,
    dense: bool = True,
    progress: Progress = lambda stage, done, total: None,
) -> Iterator[DecodeCost]:
    """Rows for every length: dense first, then each of `settings`, a variant's name and what it is, with its files in `folder`.

    Without `dense` there is room for lengths whose whole KV memory does not hold.
    Raises InvalidRequest if a length and the steps do not fit the model's context, or memory is too little.
    """
    if steps < 1:
        raise InvalidRequest(f"steps is {steps}; at least 1 is needed")
    each = len(settings) + dense
    total = len(lengths) * each
    for number, length in enumerate(lengths):
        adapter.check_length(length, WARM_UP + steps)
        stage = f"{length:,} tokens"
        done = number * each
        progress(stage, done, total)
        if dense:
            yield _dense(adapter, length, steps, seed)
        for count, (name, chosen) in enumerate(settings, start=dense):
            progress(stage, done + count, total)
            yield _retrieved(adapter, name, replace(chosen, folder=folder), length, steps, seed)
    progress("done", total, total)


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


def _dense(adapter: Adapter, length: int, steps: int, seed: int) -> DecodeCost:
    canvas = adapter.canvas(length)
    for index, layer in enumerate(canvas.layers):
        keys, values = (
            rows[None].to(adapter.geometry.device) for rows in made_up(adapter, index, length, seed)
        )
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    _timed_steps(adapter, canvas, WARM_UP)
    return DecodeCost(
        strategy=DENSE,
        storage="exact",
        decode_tokens=length,
        budget=None,
        steps=steps,
        latency_s_per_token=_timed_steps(adapter, canvas, steps),
        dense_kv_bytes=length * adapter.geometry.token_bytes,
    )


def _retrieved(
    adapter: Adapter, name: str, settings: ClusteredKV, length: int, steps: int, seed: int
) -> DecodeCost:
    with RetrievedKV(adapter.geometry, settings, torch.arange(length)) as held:
        for index in range(adapter.geometry.layers):
            keys, values = made_up(adapter, index, length, seed)
            heads = adapter.model.config.get_text_config(decoder=True).num_attention_heads
            rows = torch.linspace(length // 2, length - 1, min(32, length)).long()
            queries = keys[:, rows].repeat_interleave(
                heads // keys.shape[0], 0
            )  # (H, T, D): like what is asked later
            held.fill(index, keys, values, queries, None)
        _timed_steps(adapter, held, WARM_UP)
        before = held.counts.copy()
        latency = _timed_steps(adapter, held, steps)
        counts = held.counts.since(before)
        return DecodeCost(
            strategy=name,
            storage=settings.storage,
            decode_tokens=length,
            budget=settings.kv_budget,
            steps=steps,
            latency_s_per_token=latency,
            dense_kv_bytes=length * adapter.geometry.token_bytes,
            direct=held.parts.store.pages.file.direct,
            resident_bound_bytes=settings.resident_bytes,
            decoding=counts.per_token(),
            written_bytes_per_token=counts.bytes_written / steps,
            split_bytes_per_token=counts.split_bytes_read / steps,
            moved_bytes_per_token=counts.moved_bytes / steps,
        )


def _timed_steps(adapter: Adapter, held: Continued, steps: int) -> Spread:
    """Seconds of each step; tokens drawn beforehand, so that every row of the report decodes the same."""
    random = torch.Generator().manual_seed(steps)
    vocabulary = adapter.model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.randint(0, vocabulary, (steps,), generator=random).tolist()
    taken = []
    for token in tokens:
        began = time.perf_counter()
        adapter.step(held, token)
        adapter.synchronize()
        taken.append(time.perf_counter() - began)
    return Spread.of(taken)
