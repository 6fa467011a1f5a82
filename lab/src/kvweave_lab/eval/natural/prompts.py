"""Prompts of the natural benchmark: a question, the chunks that retrieval finds for it, and worked examples before them.

The chunks are the best ones, as many as a length takes, in the product's reading order. They depend on the question alone, so that
every recipe gets the same prompt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import xxhash

from kvweave.answering.kb_question import reading_order
from kvweave.index.search import FoundChunk
from kvweave.models.adapter import Adapter
from kvweave.models.chat_template import ANSWER_LEAD, QUESTION_LEAD, SEPARATOR
from kvweave.types import Prompt, TokenizedPrompt
from kvweave_lab.eval.natural.library import Library
from kvweave_lab.eval.natural.questions import Question

LENGTHS: Final = (1024, 2048, 4096, 8192)
MAX_NEW_TOKENS: Final = 24

_MORE: Final = 1.5
"""So many times the chunks that fill a context are asked for, in case that the best ones are short."""

EXAMPLES: Final = (
    (
        "Marta took over the ferry office in May. Tickets for the crossing cost four crowns then, and five since the new"
        " boat came.",
        "What does a ticket for the crossing cost now?",
        "five crowns",
    ),
    (
        "The lamp on the north pier was repaired by Osgood's. The firm asked for a second visit, which took place on 3 June.",
        "When did Osgood's come to the north pier again?",
        "3 June",
    ),
    (
        "Two kilns stand in the yard. The older one is fired with birch, the other one with gas.",
        "What fires the newer kiln in the yard?",
        "gas",
    ),
)
"""Notes, a question and its answer, for models that learn from the prompt how short an answer is."""

_LEAD: Final = "Read the notes below and answer the questions with a few words from the notes."


def instruction(examples: int) -> str | None:
    """Return the system instruction with that many worked examples, at most three; None without, the product's own."""
    if not examples:
        return None
    shown = (
        f"{notes}{SEPARATOR}{QUESTION_LEAD}{question}{ANSWER_LEAD} {answer}"
        for notes, question, answer in EXAMPLES[:examples]
    )
    return SEPARATOR.join([_LEAD, *shown])


@dataclass(frozen=True, slots=True)
class NaturalPrompt:
    """One prompt.

    Attributes:
        name: identifies it; the same prompt has the same name in every run.
        question: what is asked.
        context_tokens: the length that was asked for.
        chunks: numbers in the library, in prompt order.
        evidence: share of the question's quotes whose chunk is in the context; None for a question without quotes.
        tokens: the rendered prompt.
    """

    name: str
    question: Question
    context_tokens: int
    chunks: tuple[int, ...]
    evidence: float | None
    tokens: TokenizedPrompt


def make_prompt(
    adapter: Adapter,
    library: Library,
    question: Question,
    context_tokens: int,
    system: str | None,
    new_tokens: int = MAX_NEW_TOKENS,
) -> NaturalPrompt:
    """Retrieve the chunks for a question and render the prompt.

    Raises PromptTooLong if the model has no room for the prompt and `new_tokens` more.
    """
    chosen = retrieve(library, question, context_tokens)
    numbers = tuple(library.number(found) for found in reading_order(chosen))
    tokens = adapter.template.render(
        Prompt(question.text, tuple(library.chunks[number].text for number in numbers), system)
    )
    adapter.check_length(tokens.tokens, new_tokens)
    digest = xxhash.xxh3_64_hexdigest(np.array(tokens.token_ids, dtype=np.int64).tobytes())[:8]
    return NaturalPrompt(
        f"{question.id}/{context_tokens}/{digest}",
        question,
        context_tokens,
        numbers,
        found_share(library, question, numbers),
        tokens,
    )


def retrieve(library: Library, question: Question, context_tokens: int) -> list[FoundChunk]:
    """Return the best chunks for a question, best first: as many as come nearest to the length, at least one."""
    mean = sum(len(chunk.token_ids) for chunk in library.chunks) / len(library.chunks)
    found = library.search(question.text, math.ceil(_MORE * context_tokens / mean) + 2)
    lengths = (len(library.chunks[library.number(chunk)].token_ids) for chunk in found)
    missed = [abs(context_tokens - total) for total in accumulate(lengths)]
    return found[: missed.index(min(missed)) + 1]


def found_share(library: Library, question: Question, numbers: Sequence[int]) -> float | None:
    """Return the share of a question's quotes whose chunk is among these; None for a question without quotes."""
    held = [library.holder(evidence) in numbers for evidence in question.evidence]
    return sum(held) / len(held) if held else None


def no_context(adapter: Adapter, question: Question, system: str | None) -> TokenizedPrompt:
    """Return the prompt with the question alone."""
    return adapter.template.render(Prompt(question.text, (), system))
