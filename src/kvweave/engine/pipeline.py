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
    """One request. `ratio` None is the recipe's own; `drop_chunks` allows leaving out the lowest-ranked chunks."""

    text: str
    recipe: Recipe
    ratio: float | None
    top_k: int
    system: str
    generation: GenerationConfig
    max_new_tokens: int
    drop_chunks: bool = False


def answer(parts: Parts, question: Question) -> Generator[str, None, Answer]:
    """Yield the answer's text piece by piece; the generator's return value is the whole Answer.

    Raises InvalidRequest (an impossible ratio), PromptTooLong and KnowledgeBaseError (a lost index) before the
    first piece.
    """
    began = time.perf_counter()
    found = _retrieve(parts, question)
    retrieved = time.perf_counter()
    prompt, kept = _assemble(parts.adapter, question, found)
    assembled = time.perf_counter()
    result = run(question.recipe, parts.adapter, parts.store, prompt, ratio=question.ratio)
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
    return Answer(decoded.text.strip(), tuple(_source(f) for f in kept), result.plan, timing)


def _retrieve(parts: Parts, question: Question) -> list[Found]:
    """The best chunks for the question, best first."""
    vector = parts.encoder.encode([question.text])[0]
    found = parts.bank.search(question.text, vector, question.top_k, parts.shelf.visible())
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
