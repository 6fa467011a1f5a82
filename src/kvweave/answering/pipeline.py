"""One request, from question to answer: kvweave's table of contents.

look up    the question in the answer cache     answering/cached_answers   (before this, needs no model: answering/ask)
retrieve   question -> chunks                   index/vector_index
prefetch   start loading the chunks' KV         kvstore/chunk_store
prefill    match, place, select, recompute      recipes/recipe
generate   first logits -> text                 answering/generation
remember   store the exact KV and the answer    kvstore, answering/cached_answers
"""

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace

from kvweave.answering.answer_stream import Answered, Events
from kvweave.answering.generation import (
    Decoded,
    end_tokens,
    generate_from,
    generate_plainly,
    generate_remotely,
)
from kvweave.answering.kb_question import Asked
from kvweave.config import GenerationConfig
from kvweave.decode.handoff import PromptOffloader
from kvweave.errors import InvalidRequest
from kvweave.kvstore.kv_store import KVStore
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.models.snapshot_adapter import SnapshotAdapter, fused
from kvweave.recipes.recipe import Recipe, remember, run, store_entries
from kvweave.recipes.request import PrefillResult
from kvweave.recipes.snapshots import SnapshotResult, run_from_snapshot, uses_exact_prefixes_alone
from kvweave.remote.answer import RemoteAnswer, ask
from kvweave.remote.model import AnyModel, RemoteModel
from kvweave.results import Answer, Piece, Prefill
from kvweave.types import TokenizedPrompt

_LOG = logging.getLogger(__name__)

Prefilled = PrefillResult | SnapshotResult | RemoteAnswer


def check_supported(model: AnyModel, asked: Asked) -> None:
    """Raise UnsupportedModel if what is asked needs more than a model gives that runs elsewhere, or continues exact prefixes alone."""
    fallback = asked.options.generation.fallback_margin > 0
    if fallback and asked.kv is not None:
        raise InvalidRequest(
            "fallback_margin needs all KV in memory; set it to 0, or leave out kv_budget and resident_bytes"
        )
    if isinstance(model, Adapter):
        return
    if fallback:
        fused(model, "a fallback to full prefill (fallback_margin)")
    if isinstance(model, RemoteModel):
        model.check_recipe(asked.recipe)
    elif not uses_exact_prefixes_alone(asked.recipe):
        fused(model, f"recipe {asked.recipe.name}")
    if asked.kv is not None:
        fused(model, "decoding with KV in a file (--kv-budget, --resident-bytes)")


def respond(model: AnyModel, store: KVStore, asked: Asked) -> Events:
    """Yield the progress of the prompt, the answer's text piece by piece, and last the complete answer.

    Raises:
        InvalidRequest, PromptTooLong, and as `asked.assemble`: before the first piece.
        Cancelled: between any two passes.
    """
    began = time.perf_counter() - asked.judge_s
    options, recipe = asked.options, asked.recipe
    yield Prefill(0, 0)
    most = options.max_new_tokens(model.geometry.context_tokens)
    with store.lease() as lease:
        prompt = asked.assemble(store, lease, most)
        assembled = time.perf_counter()
        yield Prefill(0, prompt.tokens)
        result: Prefilled
        if isinstance(model, RemoteModel):
            result = ask(
                model, store, recipe, prompt, options.generation, most, end_tokens(model), options.coverage
            )
        elif isinstance(model, SnapshotAdapter):
            budget = recipe.budget(None, options.coverage)
            result = run_from_snapshot(recipe, model, store, prompt, budget)
        else:
            result = run(
                recipe,
                model,
                store,
                prompt,
                coverage=options.coverage,
                lease=lease,
                sink=None if asked.kv is None else PromptOffloader(model.geometry, asked.kv),
            )
    first_logits = time.perf_counter()
    yield Prefill(prompt.tokens, prompt.tokens, result.plan.exact_tokens + result.plan.reused_tokens)

    decoded = Decoded()
    with closing(_generate(result, prompt, options.generation, most, decoded, asked.drafts)) as pieces:
        for text in pieces:
            yield Piece(text, decoded.piece_tokens)
    finished = time.perf_counter()

    store_entries(result.new_entries, store, model.fingerprint)
    timing = replace(
        result.timing,
        retrieve_s=asked.retrieve_s,
        judge_s=asked.judge_s,
        tokenize_s=assembled - began - asked.judge_s - asked.retrieve_s,
        ttft_s=first_logits - began,
        decode_s=decoded.seconds,
        total_s=finished - began,
        answer_tokens=decoded.tokens,
        accepted_draft_tokens=decoded.accepted_draft_tokens,
    )
    whole = Answer(
        decoded.text.strip(),
        asked.sources,
        replace(
            result.plan,
            auto=options.auto,
            without_vector=asked.without_vector,
            fallback_at=decoded.fallback_at,
        ),
        timing,
        decoded.decoding,
        decoded.reasoning,
        decoded.finish_reason,
    )
    if decoded.missing_answer:
        _LOG.warning(decoded.missing_answer)
    else:
        asked.keep(whole)
    yield Answered(whole, prompt, result.selected, result.scores, model.tokenizer)


def reply_to(
    model: Adapter | RemoteModel,
    store: KVStore,
    recipe: Recipe,
    prompt: TokenizedPrompt,
    generation: GenerationConfig,
    most: int,
    *,
    keep: bool = False,
) -> Decoded:
    """Return the whole reply to a prompt, without what belongs to a request; `keep` the exact KV that it leaves here."""
    decoded = Decoded()
    result: Prefilled
    if isinstance(model, RemoteModel):
        result = ask(model, store, recipe, prompt, generation, most, end_tokens(model))
    else:
        result = run(recipe, model, store, prompt)
        if keep:
            remember(result)
    for _ in _generate(result, prompt, generation, most, decoded, ()):
        pass
    return decoded


def _generate(
    result: Prefilled,
    prompt: TokenizedPrompt,
    generation: GenerationConfig,
    most: int,
    decoded: Decoded,
    drafts: Sequence[tuple[int, ...]],
) -> Generator[str, None, None]:
    """Return the pieces of the reply to a prefilled prompt, as they come."""
    if isinstance(result, RemoteAnswer):
        return generate_remotely(result, generation, most, decoded)
    if isinstance(result, SnapshotResult):
        return generate_plainly(result, prompt.token_ids, generation, most, decoded, prompt.reply)
    return generate_from(result, generation, most, decoded, drafts=drafts)


def prefill_turn(
    adapter: Adapter,
    store: KVStore,
    recipe: Recipe,
    prompt: TokenizedPrompt,
    sink: LayerSink,
    prefix_context: PrefixContext | None,
) -> PrefillResult:
    """Prefill one turn of a conversation at the recipe's own budget, stream its layers, remember what is exact."""
    with store.lease() as lease:
        result = run(recipe, adapter, store, prompt, lease=lease, sink=sink, prefix_context=prefix_context)
    remember(result)
    return result
