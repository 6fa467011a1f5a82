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
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from kvweave.answer_cache.records import Vector
from kvweave.answering.answer_stream import Answered, Events
from kvweave.answering.cached_answers import CachedAnswers
from kvweave.answering.generation import Decoded, generate, generate_plainly
from kvweave.answering.kb_question import Assembled, KBQuestion
from kvweave.answering.settings import AskOptions
from kvweave.config import GenerationConfig
from kvweave.decode.handoff import PromptOffloader
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.models.snapshot_adapter import LoadedModel, SnapshotAdapter, fused
from kvweave.recipes.recipe import Recipe, remember, run, store_entries
from kvweave.recipes.request import PrefillResult
from kvweave.recipes.snapshots import SnapshotResult, run_from_snapshot, uses_exact_prefixes_alone
from kvweave.results import Answer, Piece, Prefill
from kvweave.state.components import RequestContext
from kvweave.types import NO_CONTEXT, QuestionContext, TokenizedPrompt

_LOG = logging.getLogger(__name__)


def check_supported(model: LoadedModel, options: AskOptions) -> None:
    """Raise UnsupportedModel if a model can only be continued from exact prefixes and the options ask for more."""
    if isinstance(model, Adapter):
        return
    if not uses_exact_prefixes_alone(options.recipe):
        fused(model, f"recipe {options.recipe.name}")
    if options.kv is not None:
        fused(model, "decoding with KV in a file (--kv-budget, --resident-bytes)")


class Asked(Protocol):
    """What is asked: it makes the prompt, and keeps the answer where that is worth it."""

    def assemble(self, store: KVStore, lease: Lease, most: int) -> Assembled:
        """Return the prompt, with room for a reply of `most` tokens; raises PromptTooLong, InvalidRequest, …."""
        ...

    def keep(self, answer: Answer) -> None:
        """Keep a finished answer."""
        ...


def answer(
    context: RequestContext,
    cached: CachedAnswers,
    question: str,
    vector: Callable[[], Vector],
    options: AskOptions,
    question_context: QuestionContext = NO_CONTEXT,
) -> Events:
    """Answer a question to a knowledge base, `vector` giving its embedding; see `respond`.

    Raises KnowledgeBaseError for a lost index.
    """
    asked = KBQuestion(context, cached, question, vector, options, question_context)
    return respond(context.model, context.store, asked, options)


def respond(model: LoadedModel, store: KVStore, asked: Asked, options: AskOptions) -> Events:
    """Yield how far the prompt is, the answer's text piece by piece, and at last the whole.

    Raises:
        InvalidRequest, PromptTooLong, and as `asked.assemble`: before the first piece.
        Cancelled: between any two passes.
    """
    began = time.perf_counter()
    yield Prefill(0, 0)
    most = options.max_new_tokens(model.geometry.context_tokens)
    with store.lease() as lease:
        prompt, sources, drafts, retrieve_s, without_vector = asked.assemble(store, lease, most)
        assembled = time.perf_counter()
        yield Prefill(0, prompt.tokens)
        result: PrefillResult | SnapshotResult
        if isinstance(model, SnapshotAdapter):
            budget = options.recipe.budget(options.ratio, options.coverage)
            result = run_from_snapshot(options.recipe, model, store, prompt, budget)
        else:
            result = run(
                options.recipe,
                model,
                store,
                prompt,
                ratio=options.ratio,
                coverage=options.coverage,
                lease=lease,
                sink=None if options.kv is None else PromptOffloader(model.geometry, options.kv),
            )
    first_logits = time.perf_counter()
    yield Prefill(prompt.tokens, prompt.tokens, result.plan.exact_tokens + result.plan.reused_tokens)

    decoded = Decoded()
    with closing(_generate(result, prompt, options.generation, most, decoded, drafts)) as pieces:
        for text in pieces:
            yield Piece(text, decoded.piece_tokens)
    finished = time.perf_counter()

    store_entries(result.new_entries, store, model.fingerprint)
    timing = replace(
        result.timing,
        retrieve_s=retrieve_s,
        tokenize_s=assembled - began - retrieve_s,
        ttft_s=first_logits - began,
        decode_s=decoded.seconds,
        total_s=finished - began,
        answer_tokens=decoded.tokens,
        accepted_draft_tokens=decoded.accepted_draft_tokens,
    )
    whole = Answer(
        decoded.text.strip(),
        sources,
        replace(result.plan, auto=options.auto, without_vector=without_vector),
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


def _generate(
    result: PrefillResult | SnapshotResult,
    prompt: TokenizedPrompt,
    generation: GenerationConfig,
    most: int,
    decoded: Decoded,
    drafts: Sequence[tuple[int, ...]],
) -> Generator[str, None, None]:
    """Return the pieces of the reply to a prefilled prompt, as they come."""
    ids = prompt.token_ids
    if isinstance(result, SnapshotResult):
        return generate_plainly(result, ids, generation, most, decoded, prompt.reply)
    return generate(
        result.request.adapter,
        result.kv_cache,
        ids,
        result.logits,
        generation,
        most,
        decoded,
        drafts=drafts,
        form=prompt.reply,
    )


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
