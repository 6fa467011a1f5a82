"""One request, from question to answer: the table of contents of kvweave.

  ② retrieve   question → chunks              knowledge/bank
  ③ prefill    match → place → select → …     recipes/recipe
  ④ generate   first logits → text            engine/generation
  ⑥ remember   what was computed and is exact → store

(① the answer bank and ⑤, streaming to a server, join as those parts are built.)
"""

import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.core import Answer, Prompt, Source, TokenizedPrompt
from kvweave.embedding.encoder import TextEncoder
from kvweave.engine.generation import Decoded, generate
from kvweave.errors import KnowledgeBaseError
from kvweave.knowledge.bank import ChunkBank, Found
from kvweave.knowledge.shelf import Shelf
from kvweave.models.adapter import Adapter
from kvweave.recipes.recipe import Recipe, remember, run
from kvweave.store.chunk_store import ChunkStore


@dataclass(frozen=True, slots=True)
class Parts:
    """What a request passes through."""

    adapter: Adapter
    shelf: Shelf
    bank: ChunkBank
    encoder: TextEncoder
    store: ChunkStore


@dataclass(frozen=True, slots=True)
class Question:
    """One request; `drop_chunks` allows leaving out the lowest-ranked chunks.

    `ratio` or `coverage` is the budget, the recipe's own where both are None.
    """

    text: str
    recipe: Recipe
    ratio: float | None
    coverage: float | None
    top_k: int
    system: str
    generation: GenerationConfig
    max_new_tokens: int
    drop_chunks: bool = False


class Answered(NamedTuple):
    """A whole answer, and what it takes to explain it: the prompt, and the positions (k,) that were recomputed."""

    answer: Answer
    prompt: TokenizedPrompt
    selected: Tensor


def answer(parts: Parts, question: Question) -> Generator[str, None, Answered]:
    """Yield the answer's text piece by piece; the generator's return value is the whole.

    Raises InvalidRequest (an impossible budget), PromptTooLong and KnowledgeBaseError (a lost index) before the
    first piece.
    """
    began = time.perf_counter()
    found = _retrieve(parts, question.text, question.top_k)
    retrieved = time.perf_counter()
    prompt, kept = _assemble(parts.adapter, question, found)
    assembled = time.perf_counter()
    result = run(
        question.recipe,
        parts.adapter,
        parts.store,
        prompt,
        ratio=question.ratio,
        coverage=question.coverage,
    )
    first_logits = time.perf_counter()

    decoded = Decoded()
    yield from generate(
        parts.adapter,
        result.canvas,
        prompt.token_ids,
        result.logits,
        question.generation,
        question.max_new_tokens,
        decoded,
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
    )
    whole = Answer(decoded.text.strip(), tuple(_source(f) for f in kept), result.plan, timing)
    return Answered(whole, prompt, result.selected)


def prompt_for(parts: Parts, text: str, top_k: int, system: str) -> Prompt:
    """What a question would be answered from: the chunks found for it, as they would stand in the prompt.

    Raises KnowledgeBaseError for a lost index.
    """
    ordered = _reading_order(_retrieve(parts, text, top_k))
    return Prompt(text, tuple(found.text for found in ordered), system)


def _retrieve(parts: Parts, text: str, top_k: int) -> list[Found]:
    """The best chunks for a question, best first."""
    vector = parts.encoder.encode([text])[0]
    found = parts.bank.search(text, vector, top_k, parts.shelf.visible())
    if not found:
        raise KnowledgeBaseError(
            "the index holds none of the listed documents; run `kvweave add` on them again"
        )
    return found


def _assemble(
    adapter: Adapter, question: Question, found: list[Found]
) -> tuple[TokenizedPrompt, list[Found]]:
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


def _reading_order(found: list[Found]) -> list[Found]:
    """Documents by their best chunk's rank; within a document, chunks as they follow each other.

    A sentence may only make sense after the one before the cut.
    """
    ranks: dict[str, int] = {}
    for rank, chunk in enumerate(found):
        ranks.setdefault(chunk.source, rank)
    return sorted(found, key=lambda chunk: (ranks[chunk.source], chunk.position))


def _source(found: Found) -> Source:
    return Source(found.source, found.start, found.end, found.text, found.score)
