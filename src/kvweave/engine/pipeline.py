"""One request, from question to answer: the table of contents of kvweave.

  ① repeat     asked before: its answer       answers/bank, engine/repeats
  ② retrieve   question → chunks              knowledge/bank
     prefetch   chunks → their KV under way    store/tiers
  ③ prefill    match → place → select → …     recipes/recipe, and layer by layer to flash: decode/entering
  ④ generate   first logits → text            engine/generation
  ⑥ remember   what was computed and is exact → store; the answer → answers/bank

(⑤, streaming to a server, joins as that part is built. ① needs no model, so `questions` goes through it before
one is loaded, and comes here only for what was not asked before.)
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.answer_cache.records import AnswerSettings, CachedAnswer, Vector
from kvweave.config import GenerationConfig
from kvweave.decode.handoff import PromptOffloader
from kvweave.decode.settings import OffloadSettings
from kvweave.embedding import TextEncoder
from kvweave.engine.cached_answers import CachedAnswers, provenance
from kvweave.engine.generation import Decoded, generate
from kvweave.engine.speculative import drafts_of
from kvweave.errors import KnowledgeBaseError
from kvweave.index.documents import DocumentTable
from kvweave.index.vector_index import FoundChunk, VectorIndex
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.models.cache_base import LayerSink, PrefixContext
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.recipes.request import PrefillResult
from kvweave.types import Answer, Prompt, Source, TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Parts:
    """What a request passes through."""

    adapter: Adapter
    shelf: DocumentTable
    bank: VectorIndex
    encoder: TextEncoder
    store: ChunkStore


@dataclass(frozen=True, slots=True)
class Question:
    """One request; `drop_chunks` allows leaving out the lowest-ranked chunks.

    `ratio` or `coverage` is the budget, the recipe's own where both are None. `vector` gives the question's vector;
    under `circumstances` the answer is kept, None: it is not. `kv`: how the KV is held while the answer is decoded, None
    for all of it in memory. `drafts`: whether an earlier answer to a near question is a draft of this one.
    """

    text: str
    vector: Callable[[], Vector]
    circumstances: AnswerSettings | None
    recipe: Recipe
    ratio: float | None
    coverage: float | None
    top_k: int
    system: str
    generation: GenerationConfig
    max_new_tokens: int
    drop_chunks: bool = False
    kv: OffloadSettings | None = None
    drafts: bool = False


class Answered(NamedTuple):
    """A whole answer, and what it takes to explain it: the prompt, and the positions (k,) that were recomputed."""

    answer: Answer
    prompt: TokenizedPrompt
    selected: Tensor


def repeat(
    repeats: CachedAnswers, question: str, vector: Callable[[], Vector], cache_hit: CachedAnswer, began: float
) -> Generator[str, None, Answered]:
    """Yield an answer that was given before, in one piece; afterwards the question waits for one of its own."""
    whole = repeats.give(cache_hit, began)
    yield whole.text
    repeats.gave(cache_hit, question, vector)
    return Answered(whole, TokenizedPrompt((), (), (0, 0)), torch.empty(0, dtype=torch.long))


def answer(parts: Parts, repeats: CachedAnswers, question: Question) -> Generator[str, None, Answered]:
    """Yield the answer's text piece by piece; the generator's return value is the whole.

    Raises InvalidRequest (an impossible budget), PromptTooLong and KnowledgeBaseError (a lost index) before the
    first piece.
    """
    began = time.perf_counter()
    epoch = repeats.answers.epoch
    sink = None if question.kv is None else PromptOffloader(parts.adapter.geometry, question.kv)
    with parts.store.lease() as lease:
        found = _retrieve(parts, question.text, question.vector(), question.top_k)
        retrieved = time.perf_counter()
        _prefetch(parts, question, found, lease)
        prompt, kept = _assemble(parts.adapter, question, found)
        drafts = _drafts(parts.adapter, repeats, question)
        assembled = time.perf_counter()
        result = run(
            question.recipe,
            parts.adapter,
            parts.store,
            prompt,
            ratio=question.ratio,
            coverage=question.coverage,
            lease=lease,
            sink=sink,
        )
    first_logits = time.perf_counter()

    decoded = Decoded()
    yield from generate(
        parts.adapter,
        result.kv_cache,
        prompt.token_ids,
        result.logits,
        question.generation,
        question.max_new_tokens,
        decoded,
        drafts=drafts,
    )
    finished = time.perf_counter()

    remember(result)
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
    whole = Answer(
        decoded.text.strip(), tuple(_source(f) for f in kept), result.plan, timing, decoded.decoding
    )
    if question.circumstances is not None:
        repeats.keep(
            question.text, question.vector(), question.circumstances, whole, provenance(found, epoch)
        )
    return Answered(whole, prompt, result.selected)


def assembled(parts: Parts, question: Question) -> TokenizedPrompt:
    """The prompt that a question would be answered from, and nothing computed; raises as `answer` does."""
    found = _retrieve(parts, question.text, question.vector(), question.top_k)
    return _assemble(parts.adapter, question, found)[0]


def prefilled(
    adapter: Adapter,
    store: ChunkStore,
    recipe: Recipe,
    prompt: TokenizedPrompt,
    sink: LayerSink,
    prefix_context: PrefixContext | None,
) -> PrefillResult:
    """A prompt computed by a recipe at its own budget, handed over, what is exact and new remembered."""
    with store.lease() as lease:
        result = run(recipe, adapter, store, prompt, lease=lease, sink=sink, prefix_context=prefix_context)
    remember(result)
    return result


def prompt_for(parts: Parts, text: str, top_k: int, system: str) -> Prompt:
    """What a question would be answered from: the chunks found for it, as they would stand in the prompt.

    Raises KnowledgeBaseError for a lost index.
    """
    return Prompt(text, tuple(chunk.text for chunk in found_for(parts, text, top_k)), system)


def found_for(parts: Parts, text: str, top_k: int) -> list[FoundChunk]:
    """The chunks found for a question, in the order in which they stand in its prompt; raises as `prompt_for`."""
    return _reading_order(_retrieve(parts, text, parts.encoder.encode([text])[0], top_k))


def _retrieve(parts: Parts, text: str, vector: Vector, top_k: int) -> list[FoundChunk]:
    """The best chunks for a question, best first."""
    found = parts.bank.search(text, vector, top_k, parts.shelf.visible())
    if not found:
        raise KnowledgeBaseError(
            "the index holds none of the listed documents; run `kvweave add` on them again"
        )
    return found


def _prefetch(parts: Parts, question: Question, found: list[FoundChunk], lease: Lease) -> None:
    """Begin to load the KV of the chunks that were found, while the prompt is made of them."""
    recipe, adapter = question.recipe, parts.adapter
    if not recipe.match.anywhere:
        return
    prefix = adapter.template.prefix_ids(question.system)
    chunks = parts.shelf.chunks_at([(chunk.source, chunk.position) for chunk in found])
    wanted = [
        (chunk.kv_digest, recipe.prepare.provenances(adapter, prefix, chunk.kv_tokens)) for chunk in chunks
    ]
    parts.store.prefetch(adapter.fingerprint, wanted, lease)


def _drafts(adapter: Adapter, repeats: CachedAnswers, question: Question) -> list[tuple[int, ...]]:
    """Token ids of what the answer may be."""
    if question.circumstances is None or not question.drafts:
        return []
    text = repeats.draft(question.vector(), question.circumstances)
    return drafts_of(adapter, text) if text else []


def _assemble(
    adapter: Adapter, question: Question, found: list[FoundChunk]
) -> tuple[TokenizedPrompt, list[FoundChunk]]:
    """The tokenized prompt and the chunks that stand in it, in prompt order."""
    while True:
        ordered = _reading_order(found)
        prompt = adapter.template.render(
            Prompt(question.text, tuple(f.text for f in ordered), question.system)
        )
        over = prompt.tokens + question.max_new_tokens > adapter.geometry.context_tokens
        if not (over and question.drop_chunks and found):
            adapter.check_length(prompt.tokens, question.max_new_tokens)
            return prompt, ordered
        found = found[:-1]


def _reading_order(found: list[FoundChunk]) -> list[FoundChunk]:
    """Documents by their best chunk's rank; within a document, chunks as they follow each other.

    A sentence may only make sense after the one before the cut.
    """
    ranks: dict[str, int] = {}
    for rank, chunk in enumerate(found):
        ranks.setdefault(chunk.source, rank)
    return sorted(found, key=lambda chunk: (ranks[chunk.source], chunk.position))


def _source(found: FoundChunk) -> Source:
    return Source(found.source, found.start, found.end, found.text, found.score)
