"""One request, from question to answer: kvweave's table of contents.

look up    the question in the answer cache     engine/cached_answers   (before this, needs no model: engine/ask)
retrieve   question -> chunks                   index/vector_index
prefetch   start loading the chunks' KV         kvstore/chunk_store
prefill    match, place, select, recompute      recipes/recipe
generate   first logits -> text                 engine/generation
remember   store the exact KV and the answer    kvstore, engine/cached_answers
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvweave.answer_cache.records import CachedAnswer, Vector
from kvweave.decode.handoff import PromptOffloader
from kvweave.embedding import TextEncoder
from kvweave.engine.cached_answers import CachedAnswers, provenance
from kvweave.engine.generation import Decoded, generate, generate_plainly
from kvweave.engine.settings import AskOptions
from kvweave.engine.speculative import drafts_of
from kvweave.errors import InvalidRequest, KnowledgeBaseError
from kvweave.index.documents import DocumentTable
from kvweave.index.search import FoundChunk
from kvweave.index.vector_index import VectorIndex
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.models.snapshot_adapter import LoadedModel, SnapshotAdapter, fused
from kvweave.recipes.recipe import Recipe, remember, run, store_entries
from kvweave.recipes.request import PrefillResult
from kvweave.recipes.snapshots import SnapshotResult, run_from_snapshot, uses_exact_prefixes_alone
from kvweave.results import Answer, ExplainedToken, Source
from kvweave.types import Prompt, TokenizedPrompt

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The parts that a request passes through."""

    model: LoadedModel
    documents: DocumentTable
    index: VectorIndex
    encoder: TextEncoder
    store: KVStore

    @property
    def adapter(self) -> Adapter:
        """The model; raises UnsupportedModel if stored KV cannot be placed in it."""
        return fused(self.model)

    def check(self, options: AskOptions) -> None:
        """Raise UnsupportedModel if the model can only be continued from exact prefixes and the options ask for more."""
        if isinstance(self.model, Adapter):
            return
        if not uses_exact_prefixes_alone(options.recipe):
            fused(self.model, f"recipe {options.recipe.name}")
        if options.kv is not None:
            fused(self.model, "decoding with KV in a file (--kv-budget, --resident-bytes)")


class Answered(NamedTuple):
    """A whole answer and what explains it: the prompt, and the positions (k,) that were recomputed."""

    answer: Answer
    prompt: TokenizedPrompt
    selected: Tensor


class AnswerStream:
    """Iterate for the pieces of an answer; `answer` and `explain` are there once the iteration has ended.

    Args:
        pieces: yields text, returns the whole.
        tokenizer: the model's; None where the answer came from the answer cache.
        request: closed when the iteration ends.
    """

    def __init__(
        self, pieces: Generator[str, None, Answered], tokenizer: Any, request: AbstractContextManager[object]
    ) -> None:
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._request = request
        self._answered: Answered | None = None

    def __iter__(self) -> Iterator[str]:
        with self._request:
            finished: Answered | None = yield from self._pieces
        # A second iteration yields nothing and must not lose the answer.
        self._answered = finished or self._answered

    @property
    def answer(self) -> Answer:
        """The whole answer; raises InvalidRequest while pieces are still to come."""
        return self._finished.answer

    def explain(self) -> tuple[ExplainedToken, ...]:
        """Return every token of the prompt with the origin of its KV; raises as `answer` does."""
        from kvweave.engine.explanation import explain

        return explain(self._finished, self._tokenizer)

    @property
    def _finished(self) -> Answered:
        if self._answered is None:
            raise InvalidRequest("the answer is not finished: iterate over the stream to its end first")
        return self._answered


def answer_from_cache(
    cached: CachedAnswers, question: str, vector: Callable[[], Vector], found: CachedAnswer, began: float
) -> Generator[str, None, Answered]:
    """Yield a cached answer in one piece, then queue the question for an answer of its own at idle time."""
    whole = cached.answer(found, began)
    yield whole.text
    cached.record_hit(found, question, vector)
    return Answered(whole, TokenizedPrompt((), (), (0, 0)), torch.empty(0, dtype=torch.long))


def answer(
    context: RequestContext,
    cached: CachedAnswers,
    question: str,
    vector: Callable[[], Vector],
    options: AskOptions,
) -> Generator[str, None, Answered]:
    """Yield the answer's text piece by piece; the generator returns the whole.

    `vector` gives the question's embedding.

    Raises:
        InvalidRequest, PromptTooLong, KnowledgeBaseError (a lost index): before the first piece.
    """
    began = time.perf_counter()
    model = context.model
    # Read before the search: a document that comes in later makes the answer old.
    epoch = cached.answers.epoch
    most = options.max_new_tokens(model.geometry.context_tokens)
    with context.store.lease() as lease:
        found = retrieve(context, question, vector(), options.top_k)
        retrieved = time.perf_counter()
        _prefetch(context, options, found, lease)
        prompt, kept = _assemble(model, question, options, found, most)
        drafts = _drafts(model, cached, vector, options)
        assembled = time.perf_counter()
        result: PrefillResult | SnapshotResult
        if isinstance(model, SnapshotAdapter):
            budget = options.recipe.budget(options.ratio, options.coverage)
            result = run_from_snapshot(options.recipe, model, context.store, prompt, budget)
        else:
            result = run(
                options.recipe,
                model,
                context.store,
                prompt,
                ratio=options.ratio,
                coverage=options.coverage,
                lease=lease,
                sink=None if options.kv is None else PromptOffloader(model.geometry, options.kv),
            )
    first_logits = time.perf_counter()

    decoded = Decoded()
    if isinstance(result, SnapshotResult):
        yield from generate_plainly(result, prompt.token_ids, options.generation, most, decoded, prompt.reply)
    else:
        yield from generate(
            result.request.adapter,
            result.kv_cache,
            prompt.token_ids,
            result.logits,
            options.generation,
            most,
            decoded,
            drafts=drafts,
            form=prompt.reply,
        )
    finished = time.perf_counter()

    store_entries(result.new_entries, context.store, model.fingerprint)
    timing = replace(
        result.timing,
        retrieve_s=retrieved - began,
        tokenize_s=assembled - retrieved,
        ttft_s=first_logits - began,
        decode_s=decoded.seconds,
        total_s=finished - began,
        answer_tokens=decoded.tokens,
        accepted_draft_tokens=decoded.accepted_draft_tokens,
    )
    sources = tuple(Source(f.source, f.start, f.end, f.text, f.score) for f in kept)
    whole = Answer(
        decoded.text.strip(),
        sources,
        result.plan,
        timing,
        decoded.decoding,
        decoded.reasoning,
        decoded.finish_reason,
    )
    if decoded.missing_answer:
        _LOG.warning(decoded.missing_answer)
    elif options.answer_settings is not None:
        cached.keep(question, vector(), options.answer_settings, whole, provenance(found, epoch))
    return Answered(whole, prompt, result.selected)


def retrieve(context: RequestContext, question: str, vector: Vector, top_k: int) -> list[FoundChunk]:
    """Return the best chunks for a question, best first; raises KnowledgeBaseError for a lost index."""
    found = context.index.search(question, vector, top_k, context.documents.visible_versions())
    if not found:
        raise KnowledgeBaseError(
            "the index holds none of the listed documents; run `kvweave add` on them again"
        )
    return found


def found_for(context: RequestContext, question: str, top_k: int) -> list[FoundChunk]:
    """Return the chunks found for a question in prompt order; raises as `retrieve` does."""
    return _reading_order(retrieve(context, question, context.encoder.encode([question])[0], top_k))


def prompt_for(context: RequestContext, question: str, top_k: int, system: str) -> Prompt:
    """Return the prompt that a question would be answered from, without computing it; raises as `retrieve` does."""
    chunks = tuple(chunk.text for chunk in found_for(context, question, top_k))
    return Prompt(question, chunks, system)


def tokenized_prompt_for(
    context: RequestContext, question: str, vector: Vector, options: AskOptions
) -> TokenizedPrompt:
    """Return the tokens that a question would be answered from, without computing them; raises as `answer` does."""
    found = retrieve(context, question, vector, options.top_k)
    most = options.max_new_tokens(context.model.geometry.context_tokens)
    return _assemble(context.model, question, options, found, most)[0]


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


def _prefetch(context: RequestContext, options: AskOptions, found: list[FoundChunk], lease: Lease) -> None:
    """Start loading the KV of the found chunks, while the prompt is tokenized."""
    recipe, adapter = options.recipe, context.model
    if not recipe.match.position_independent or not isinstance(adapter, Adapter):
        return
    prefix = adapter.template.prefix_ids(options.system, think=options.generation.think)
    chunks = context.documents.chunks_at([(chunk.source, chunk.position) for chunk in found])
    wanted = [
        (chunk.kv_digest, recipe.prepare.provenances(adapter, prefix, chunk.kv_tokens)) for chunk in chunks
    ]
    context.store.prefetch(adapter.fingerprint, wanted, lease)


def _drafts(
    model: LoadedModel, cached: CachedAnswers, vector: Callable[[], Vector], options: AskOptions
) -> list[tuple[int, ...]]:
    """Return token ids that the answer may consist of: those of an earlier answer to a near question."""
    if not isinstance(model, Adapter):
        return []  # a recurrent state cannot take back the drafts that are rejected
    if options.answer_settings is None or options.cache != "use" or options.kv is not None:
        return []
    text = cached.draft(vector(), options.answer_settings)
    return drafts_of(model, text) if text else []


def _assemble(
    model: LoadedModel, question: str, options: AskOptions, found: list[FoundChunk], most: int
) -> tuple[TokenizedPrompt, list[FoundChunk]]:
    """Return the tokenized prompt and the chunks in it, in prompt order; `most` tokens stay free for the answer."""
    while True:
        ordered = _reading_order(found)
        texts = tuple(f.text for f in ordered)
        prompt = model.template.render(
            Prompt(question, texts, options.system, think=options.generation.think)
        )
        too_long = prompt.tokens + most > model.geometry.context_tokens
        if not (too_long and options.drop_chunks and found):
            model.check_length(prompt.tokens, most)
            return prompt, ordered
        found = found[:-1]


def _reading_order(found: list[FoundChunk]) -> list[FoundChunk]:
    """Order documents by their best chunk's rank, and the chunks of a document as they follow each other in it.

    A sentence may only make sense after the one before the cut.
    """
    ranks: dict[str, int] = {}
    for rank, chunk in enumerate(found):
        ranks.setdefault(chunk.source, rank)
    return sorted(found, key=lambda chunk: (ranks[chunk.source], chunk.position))
