"""Prefill without a knowledge base: for callers with a retriever of their own."""

import time
from collections.abc import Sequence
from dataclasses import replace

from kvweave.embedding import TextEncoder
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink
from kvweave.recipes.context import ChunkList, PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillResult
from kvweave.types import Prompt


def prefill(
    adapter: Adapter,
    store: ChunkStore,
    prompt: Prompt,
    *,
    recipe: str | Recipe = "weave",
    ratio: float | None = None,
    coverage: float | None = None,
    sink: LayerSink | None = None,
) -> PrefillResult:
    """What `kvweave.prefill` does, for a recipe or its name; who the layers are handed over to is the caller's, see `run`."""
    began = time.perf_counter()
    tokens = adapter.template.render(prompt)
    tokenize_s = time.perf_counter() - began
    result = run(_recipe(recipe), adapter, store, tokens, ratio=ratio, coverage=coverage, sink=sink)
    remember(result)
    timing = replace(
        result.timing,
        tokenize_s=tokenize_s,
        ttft_s=result.timing.ttft_s + tokenize_s,
        total_s=time.perf_counter() - began,
    )
    return replace(result, timing=timing)


def prepare(
    adapter: Adapter,
    store: ChunkStore,
    chunks: Sequence[str],
    *,
    recipe: str | Recipe = "weave",
    system: str | None = None,
    embedding: str | None = None,
) -> int:
    """Compute and store chunk KV ahead of time, as a recipe wants it; returns how many chunks were computed.

    `system` is the instruction the prompts will have (None: the default one): KV prepared behind another is
    not found. Chunks that are stored already cost a look-up. Where a recipe prepares chunks behind others, those are
    taken from the same list: the ones before it, or the most similar by the `embedding` model.
    """
    if isinstance(chunks, str):
        raise TypeError("chunks is one string; give a list or tuple of chunk texts")
    ids = [tuple(adapter.template.chunk_ids(text)) for text in chunks]
    corpus = ChunkList(
        [chunks], adapter.template.chunk_ids, lambda texts: TextEncoder(embedding).encode(texts)
    )
    ctx = PrepareContext(adapter, store, tuple(adapter.template.prefix_ids(system)), corpus)
    return prepare_chunks(ctx, ids, _recipe(recipe))


def _recipe(recipe: str | Recipe) -> Recipe:
    return recipe_named(recipe) if isinstance(recipe, str) else recipe
