"""Prefill without a knowledge base: for callers with a retriever of their own."""

import time
from collections.abc import Sequence
from dataclasses import replace

from kvweave.core import Prompt
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.prepare import prepare_chunks
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillResult
from kvweave.store.chunk_store import ChunkStore


def prefill(
    adapter: Adapter,
    store: ChunkStore,
    prompt: Prompt,
    *,
    recipe: str | Recipe = "reuse",
    ratio: float | None = None,
) -> PrefillResult:
    """Prefill a prompt from stored chunk KV, computing what is not there, and store what is worth keeping.

    `ratio` 0..1 is the share of stale context tokens to recompute, None the recipe's own. The result carries
    `logits` (1, vocab) of the last position, `plan`, `timing`, and `generate_kwargs` for an ordinary
    `adapter.model.generate(**result.generate_kwargs)`. Raises UnknownRecipe, InvalidRequest, PromptTooLong.
    """
    began = time.perf_counter()
    tokens = adapter.template.render(prompt)
    tokenize_s = time.perf_counter() - began
    result = run(_recipe(recipe), adapter, store, tokens, ratio=ratio)
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
    recipe: str | Recipe = "reuse",
    system: str | None = None,
) -> int:
    """Compute and store chunk KV ahead of time, as a recipe wants it; returns how many chunks were computed.

    `system` is the instruction the prompts will have (None: the default one): KV prepared behind another is
    not found. Chunks that are stored already cost a look-up.
    """
    if isinstance(chunks, str):
        raise TypeError("chunks is one string; give a list or tuple of chunk texts")
    ids = [adapter.template.chunk_ids(text) for text in chunks]
    return prepare_chunks(adapter, store, ids, _recipe(recipe).prepare, system=system)


def _recipe(recipe: str | Recipe) -> Recipe:
    return recipe_named(recipe) if isinstance(recipe, str) else recipe
