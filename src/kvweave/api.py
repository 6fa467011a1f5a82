"""A prompt and its answer without a knowledge base: for callers with their own retriever."""

import time
from dataclasses import replace

from kvweave.answering.generation import Decoded, generate_all
from kvweave.config import GenerationConfig
from kvweave.decode.handoff import PromptOffloader
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.match import warn_if_unknown
from kvweave.recipes.methods import as_recipe, in_any_storage
from kvweave.recipes.names import AUTO
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillResult
from kvweave.types import Prompt


def prefill(
    adapter: Adapter,
    store: KVStore,
    prompt: Prompt,
    *,
    recipe: str | Recipe = AUTO,
    prepare: str | None = None,
    storage: str | None = None,
    ratio: float | None = None,
    coverage: float | None = None,
    kv: OffloadSettings | None = None,
) -> PrefillResult:
    """Prefill a prompt from stored chunk KV, compute what is missing, and store what is worth storing.

    The result carries `logits` (1, vocab) of the last position, `plan`, `timing`, and `generate_kwargs` for an ordinary
    `adapter.model.generate(**result.generate_kwargs)`.

    Args:
        recipe: a recipe or its name.
        prepare: how the chunks were prepared, if not as the named recipe does, such as similar.
        storage: how their KV was stored: exact, int8 or int4. None takes what is there, in this order of preference.
        ratio: share 0..1 of the stale context tokens to recompute; without a budget the recipe's own is used.
        coverage: instead of a ratio, recompute as few tokens as hold this share 0..1 of the selector's scores.
        kv: write each layer to a file before the next is placed, for `kvweave.generate` alone, so that the prompt's full
            KV is never in memory. Under `kv.resident_bytes` nothing that was computed is stored.

    A name may spell all three out: similar-int8+prophetkv is prophetkv on chunks prepared as similar and stored in 8 bits.
    Where chunks are prepared, but none of their KV fits the prompt, a warning says why, once per store.
    Raises UnknownRecipe, InvalidRequest, PromptTooLong; with `kv` StoreError and StoreFull if the file fails.
    """
    sink = None if kv is None else PromptOffloader(adapter.geometry, kv)
    started = time.perf_counter()
    tokens = adapter.template.render(prompt)
    tokenize_s = time.perf_counter() - started
    chosen = as_recipe(recipe, prepare, storage or "exact")
    if storage is None and isinstance(recipe, str):
        chosen = in_any_storage(chosen)
    result = run(chosen, adapter, store, tokens, ratio=ratio, coverage=coverage, sink=sink)
    warn_if_unknown(result.request, chosen.match, chosen.prepare, result.plan)
    remember(result)
    timing = replace(
        result.timing,
        tokenize_s=tokenize_s,
        ttft_s=result.timing.ttft_s + tokenize_s,
        total_s=time.perf_counter() - started,
    )
    return replace(result, timing=timing)


def generate(
    result: PrefillResult,
    *,
    max_new_tokens: int = 256,
    kv: OffloadSettings | None = None,
    settings: GenerationConfig | None = None,
) -> Decoded:
    """Decode an answer from the result of `prefill`, whose KV cache is used up; return the text and its cost.

    The prompt decides how the reply is read: see `Prompt.think` and `Prompt.several_lines`.

    Args:
        max_new_tokens: at least 1.
        kv: keep the KV in a file and read what a token attends to; `Decoded.decoding` then says what was read. Given to
            `prefill` instead, it saves memory there too.
        settings: temperature, nucleus, seed and fallback_margin; greedy by default. The other settings are not read.

    Raises InvalidRequest for impossible values, StoreError and StoreFull if the file fails; the file is deleted.
    """
    if max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens is {max_new_tokens}; at least 1 is needed")
    return generate_all(result, settings or GenerationConfig(), max_new_tokens, kv=kv)
