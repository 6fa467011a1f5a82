"""A prompt and its answer without a knowledge base: for callers with a retriever of their own."""

from kvweave.config import GenerationConfig
from kvweave.decode.handoff import PromptOffloader
from kvweave.decode.settings import OffloadSettings
from kvweave.engine.generation import Decoded
from kvweave.engine.generation import generate as pieces
from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.chunks_api import prefill as prefilled
from kvweave.recipes.recipe import Recipe
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
    kv: OffloadSettings | None = None,
) -> PrefillResult:
    """Prefill a prompt from stored chunk KV, computing what is not there, and store what is worth keeping.

    `recipe` is a recipe or its name; similar+prophetkv, for one, is prophetkv on chunks that were prepared as similar, and
    similar-int8+prophetkv on the same stored in 8 bits.
    `ratio` 0..1 is the share of stale context tokens to recompute; instead, `coverage` 0..1 recomputes as few as
    hold that share of the selector's scores. Without either the recipe's own budget counts. The result carries
    `logits` (1, vocab) of the last position, `plan`, `timing`, and `generate_kwargs` for an ordinary
    `adapter.model.generate(**result.generate_kwargs)`.

    With `kv` each layer goes to a file before the next one is placed, for `kvweave.generate` alone: the prompt's KV never
    stands in memory as a whole, and under `kv.resident_bytes` nothing that was computed is stored. Raises UnknownRecipe,
    InvalidRequest, PromptTooLong; with `kv` StoreError and StoreFull where the file fails.
    """
    sink = None if kv is None else PromptOffloader(adapter.geometry, kv)
    return prefilled(adapter, store, prompt, recipe=recipe, ratio=ratio, coverage=coverage, sink=sink)


def generate(
    result: PrefillResult,
    *,
    max_new_tokens: int = 256,
    kv: OffloadSettings | None = None,
    settings: GenerationConfig | None = None,
) -> Decoded:
    """Decode an answer from what `prefill` returned, whose canvas is used up; the text and what it cost.

    With `kv`, given here or to `prefill`, which spares memory, the KV is in a file and each token attends to what is
    retrieved for it, within `kv.resident_bytes`; `Decoded.decoding` then says what was read. `settings` are temperature, nucleus and seed, greedy by default. Raises
    InvalidRequest for impossible values, StoreError and StoreFull where the file fails; nothing is left of it.
    """
    if max_new_tokens < 1:
        raise InvalidRequest(f"max_new_tokens is {max_new_tokens}; at least 1 is needed")
    decoded = Decoded()
    prompt = result.request.prompt
    for _ in pieces(
        result.request.adapter,
        result.kv_cache,
        prompt.token_ids,
        result.logits,
        settings or GenerationConfig(),
        max_new_tokens,
        decoded,
        kv=kv,
        question_tokens=prompt.spans[-1].tokens,
    ):
        pass
    return decoded
