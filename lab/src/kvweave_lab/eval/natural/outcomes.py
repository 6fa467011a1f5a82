"""Outcomes of the natural benchmark: one per prompt, recipe and budget, and the log that holds them on disk."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvweave_lab.eval.outcomes import FULL, REUSE, Label
from kvweave_lab.results_log import ResultsLog

NO_CONTEXT: Final = "no context"
"""The name under which full attention without chunks has its outcomes."""

ROUNDED: Final = "full, {} weights"
"""The name under which full attention with other weights has its outcomes: with the name of their number format."""

FULL_LABEL: Final[Label] = (FULL, 1.0, None)
REUSE_LABEL: Final[Label] = (REUSE, 0.0, None)
NO_CONTEXT_LABEL: Final[Label] = (NO_CONTEXT, None, None)

VERSION: Final = 2
"""The meaning of an outcome; raise it when older ones would mislead."""

OutcomeKey = tuple[str, Label]


@dataclass(frozen=True, slots=True)
class NaturalOutcome:
    """One prompt under one recipe with one budget.

    Attributes:
        prompt: the prompt's name.
        question: the question's id.
        kind: of the question.
        context_tokens: the length that was asked for.
        chunk_tokens: tokens of all chunks in the prompt, separators included.
        evidence: share of the question's quotes in the context; None for a question without an answer.
        recipe: the recipe's name; NO_CONTEXT for full attention without chunks, ROUNDED for that with other weights.
        ratio: requested share of stale context tokens to recompute; None if a coverage was requested, or nothing is reused.
        coverage: requested share of all scores; None if a ratio was requested.
        nll: negative log-likelihood of the reference answer per token, in nats, each token after the right ones before it.
        first_kl: KL(full attention ‖ recipe) of the answer's first token, in nats.
        kl: the same per token of the reference answer.
        same_first: whether the most likely first token is full attention's.
        rows: computed context tokens: the recomputed ones and those for which nothing was stored.
        answer: the generated text; None if none was asked for.
        f1: of the generated text against the best reference, 0..1; None without a text.
        contains: whether the text contains a reference, 0 or 1; None without a text.
        answer_kl: KL(full attention ‖ recipe) per token of full attention's own answer and its end, in nats; None without a text.
        agreed: share of that answer's tokens and end that the recipe chooses too, each after full attention's before it; None
            without a text.
        margins: how far the likeliest token is before the next one, in nats, at each token that is full attention's, and at the
            first that is not or the end; empty for full attention itself and without a text.
        answer_tokens: tokens of the generated answer; None without a text.
        same_tokens: how many of them are full attention's, up to the first that differs; None without a text.
        same_answer: whether all tokens and the end are full attention's; None without a text.
        ttft_s: time to the first token, from stored KV that was read before; not compared.
        full_ttft_s: the same of full attention on this prompt, measured shortly before; not compared.
        took_s: time to compute the outcome, without preparations; not compared.
    """

    prompt: str
    question: str
    kind: str
    context_tokens: int
    chunk_tokens: int
    evidence: float | None
    recipe: str
    ratio: float | None
    coverage: float | None
    nll: float
    first_kl: float
    kl: float
    same_first: bool
    rows: int
    answer: str | None = None
    f1: float | None = None
    contains: float | None = None
    answer_kl: float | None = None
    agreed: float | None = None
    margins: tuple[float, ...] = ()
    answer_tokens: int | None = None
    same_tokens: int | None = None
    same_answer: bool | None = None
    ttft_s: float = field(default=0.0, compare=False)
    full_ttft_s: float = field(default=0.0, compare=False)
    took_s: float = field(default=0.0, compare=False)

    @property
    def label(self) -> Label:
        """What ran on the prompt."""
        return self.recipe, self.ratio, self.coverage


def is_recipe(name: str) -> bool:
    """Return whether outcomes of this name are a recipe's, and not full attention's without context or with other weights."""
    return " " not in name


class NaturalLog(ResultsLog[OutcomeKey, NaturalOutcome]):
    """The outcomes of prompts under recipes; raises as ResultsLog does."""

    def __init__(self, folder: Path | None, run_config: Mapping[str, Any]) -> None:
        super().__init__(
            folder,
            run_config,
            file="natural.jsonl",
            version=VERSION,
            key=lambda outcome: (outcome.prompt, outcome.label),
            parse=lambda content: NaturalOutcome(**{**content, "margins": tuple(content.get("margins", ()))}),
        )
