"""What a fallback to full prefill would have made of the answers of a run (setting `fallback_margin`).

It computes the prompt in full before the first token of an answer that leads by less than the margin, and goes on exactly. So the
answer is full attention's if no earlier token differs from full attention's, which the outcomes tell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvweave_lab.eval.natural.outcomes import NaturalOutcome, is_recipe
from kvweave_lab.eval.outcomes import FULL
from kvweave_lab.statistics import Estimate, quotient_over_tasks, share_of

MARGINS: Final = (0.25, 0.5, 1.0, 2.0)
"""In nats."""


@dataclass(frozen=True, slots=True)
class Fallback:
    """All prompts of one context length under one recipe with one budget, with a fallback.

    Attributes:
        context_tokens, recipe, ratio, coverage: as a `Row`'s.
        margin: below which a token is open.
        prompts: their number.
        same_answer: share of answers that are full attention's, token for token.
        fell_back: share of answers before whose end the prompt was computed in full.
        time: to the first token, divided by full attention's; where the first token is open it contains the full prefill.
        prefill: the time of prefill and fallback, divided by full attention's.
    """

    context_tokens: int
    recipe: str
    ratio: float | None
    coverage: float | None
    margin: float
    prompts: int
    same_answer: Estimate | None
    fell_back: Estimate | None
    time: Estimate | None
    prefill: Estimate | None


def fallbacks(outcomes: Sequence[NaturalOutcome]) -> Iterator[Fallback]:
    """Yield a row for each length, recipe, budget and margin of those outcomes that have answers."""
    answered = [each for each in outcomes if each.margins and is_recipe(each.recipe) and each.recipe != FULL]
    for length, label in dict.fromkeys((each.context_tokens, each.label) for each in answered):
        own = [each for each in answered if (each.context_tokens, each.label) == (length, label)]
        for margin in MARGINS:
            opened = [_first_open(each, margin) for each in own]
            full = [[each.full_ttft_s for each in own]]
            yield Fallback(
                length,
                *label,
                margin,
                len(own),
                share_of(
                    [bool(each.same_answer) or at is not None for each, at in zip(own, opened, strict=True)]
                ),
                share_of([at is not None for at in opened]),
                quotient_over_tasks(
                    [
                        [
                            each.ttft_s + each.full_ttft_s * (at == 0)
                            for each, at in zip(own, opened, strict=True)
                        ]
                    ],
                    full,
                ),
                quotient_over_tasks(
                    [
                        [
                            each.ttft_s + each.full_ttft_s * (at is not None)
                            for each, at in zip(own, opened, strict=True)
                        ]
                    ],
                    full,
                ),
            )


def _first_open(outcome: NaturalOutcome, margin: float) -> int | None:
    """Return the place of the first token that leads by less than the margin, as far as the answer is full attention's."""
    return next((place for place, ahead in enumerate(outcome.margins) if ahead < margin), None)
