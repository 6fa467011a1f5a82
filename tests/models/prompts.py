"""Prompts put together from stored KV, as recipes do it: at true positions, and at overlapping ones."""

import warnings
from functools import partial

import torch

from kvweave.models.adapter import Adapter
from kvweave.models.attention import GroupedPlan
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.testing import tiny_adapter

N = 60  # within the context that families with changing frequencies were trained to
IDS = torch.randint(3, 260, (N,), generator=torch.Generator().manual_seed(1)).tolist()
STORED = 40  # positions that have stored KV: stale from 20 on

PREFIX, CHUNK, CHUNKS, QUESTION = 10, 12, 3, 8
CONTEXT = (PREFIX, PREFIX + CHUNKS * CHUNK)
APE_N = CONTEXT[1] + QUESTION
APE_IDS = torch.randint(3, 260, (APE_N,), generator=torch.Generator().manual_seed(2)).tolist()
APE_ROWS = torch.arange(CONTEXT[1], APE_N)


def quiet_adapter(family: str) -> Adapter:
    """A tiny model of a family, without the notices that configurations of tiny shapes draw from some."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny_adapter(family)


def stale_kv_cache(adapter: Adapter) -> FusedCache:
    """An exact prefix, a chunk prefilled on its own, and rows without stored KV."""
    spans = [PlacedSpan(adapter.encode(IDS[:20]), 0, 0), PlacedSpan(adapter.encode(IDS[20:STORED]), 20, 20)]
    return adapter.new_cache(N, spans)


def held(kv_cache: FusedCache, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the canvas holds at every layer, keys rotated."""
    return [
        (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone()) for layer in kv_cache.layers
    ]


def ape_positions(tokens: int = APE_N) -> torch.Tensor:
    """Chunks side by side behind the prefix, what follows behind the longest."""
    chunk = torch.arange(PREFIX, PREFIX + CHUNK)
    behind = torch.arange(PREFIX + CHUNK, PREFIX + CHUNK + tokens - CONTEXT[1])
    return torch.cat([torch.arange(PREFIX), chunk.repeat(CHUNKS), behind])


def ape_kv_cache(adapter: Adapter, tokens: int = APE_N) -> FusedCache:
    """A prompt of chunks at overlapping positions; tokens behind the question have no stored KV either."""
    prefix = adapter.encode(APE_IDS[:PREFIX])
    spans = [PlacedSpan(prefix, 0, 0)]
    for start in range(*CONTEXT, CHUNK):
        spans.append(PlacedSpan(adapter.encode(APE_IDS[start : start + CHUNK], prefix), start, PREFIX))
    return adapter.new_cache(tokens, spans, ape_positions(tokens))


def ape_plan(adapter: Adapter, rows: torch.Tensor, **options: float) -> GroupedPlan:
    return GroupedPlan(rows, adapter.geometry.dtype, columns=CONTEXT, **options)


def computed_ape_kv_cache(adapter: Adapter) -> tuple[FusedCache, torch.Tensor]:
    """The canvas with its question computed, continued as the question attends, and the question's logits."""
    kv_cache = ape_kv_cache(adapter)
    kv_cache.continuation = partial(ape_plan, adapter)
    return kv_cache, adapter.compute(kv_cache, APE_IDS, ape_plan(adapter, APE_ROWS))
