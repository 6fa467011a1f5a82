"""Prompts assembled from stored KV, as recipes do it: at true positions, and at overlapping ones."""

import warnings
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from kvweave.models.adapter import Adapter
from kvweave.models.attention import GroupedPlan
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.ops.grouped_attention import ContextGroup
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkKV

TOLERANCE = 2e-4  # as in the parity tests
N = 60  # within the trained context of families with changing frequencies
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist()
STORED = 40  # positions with stored KV: stale from 20 on

PREFIX, CHUNK, CHUNKS, QUESTION = 10, 12, 3, 8
CONTEXT = (PREFIX, PREFIX + CHUNKS * CHUNK)
APE_N = CONTEXT[1] + QUESTION
APE_IDS = torch.randint(3, 260, (APE_N,), generator=torch.Generator().manual_seed(2)).tolist()
APE_ROWS = torch.arange(CONTEXT[1], APE_N)


def quiet_adapter(family: str) -> Adapter:
    """Return a tiny model of a family; suppress the warnings that some families give for tiny configurations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny_adapter(family)


_encoded: weakref.WeakKeyDictionary[Adapter, dict[tuple[tuple[int, ...], ...], ChunkKV]] = (
    weakref.WeakKeyDictionary()
)


def encoded(adapter: Adapter, ids: Sequence[int], *before: ChunkKV) -> ChunkKV:
    """Return the KV of tokens after stored KV; an adapter computes it once. No test here is of how chunks are encoded."""
    known, key = _encoded.setdefault(adapter, {}), (tuple(ids), *(kv.token_ids for kv in before))
    if key not in known:
        known[key] = adapter.encode(ids, *before)
    return known[key]


def stale_kv_cache(adapter: Adapter) -> FusedCache:
    """Return a cache with an exact prefix, a chunk prefilled on its own, and rows without stored KV."""
    spans = [
        PlacedSpan(encoded(adapter, IDS[:20]), 0, 0),
        PlacedSpan(encoded(adapter, IDS[20:STORED]), 20, 20),
    ]
    return adapter.new_cache(N, spans)


def held(kv_cache: FusedCache, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the KV in the cache at every layer, keys rotated."""
    return [
        (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) for layer in kv_cache.layers
    ]


def ape_positions(tokens: int = APE_N) -> torch.Tensor:
    """Return positions with all chunks directly after the prefix, and the rest after the longest chunk."""
    chunk = torch.arange(PREFIX, PREFIX + CHUNK)
    after = torch.arange(PREFIX + CHUNK, PREFIX + CHUNK + tokens - CONTEXT[1])
    return torch.cat([torch.arange(PREFIX), chunk.repeat(CHUNKS), after])


def ape_kv_cache(adapter: Adapter, tokens: int = APE_N) -> FusedCache:
    """Return a cache of chunks at overlapping positions; question and later tokens have no stored KV."""
    prefix = encoded(adapter, APE_IDS[:PREFIX])
    spans = [PlacedSpan(prefix, 0, 0)]
    for start in range(*CONTEXT, CHUNK):
        spans.append(PlacedSpan(encoded(adapter, APE_IDS[start : start + CHUNK], prefix), start, PREFIX))
    return adapter.new_cache(tokens, spans, ape_positions(tokens))


def ape_plan(
    adapter: Adapter, rows: torch.Tensor, temperature: float = 0.9, scale: float = 0.9
) -> GroupedPlan:
    return GroupedPlan(rows, adapter.geometry.dtype, ContextGroup(*CONTEXT, temperature, scale))


def computed_ape_kv_cache(adapter: Adapter) -> tuple[FusedCache, torch.Tensor]:
    """Return the cache with its question computed and a continuation like the question's plan, and the logits."""
    kv_cache = ape_kv_cache(adapter)
    kv_cache.continuation = partial(ape_plan, adapter)
    return kv_cache, adapter.compute(kv_cache, APE_IDS, ape_plan(adapter, APE_ROWS))


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two results are equal but for the order of summation."""
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)
