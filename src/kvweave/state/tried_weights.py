"""What calibration has found about the model with fewer bits per weight, as a verdict holds it. Loads no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.recipes.names import EXACT


@dataclass(frozen=True, slots=True)
class WeightsTrial:
    """What full attention with fewer bits per weight has kept of the replies with the knowledge base's own.

    Attributes:
        bits: int8 or int4.
        bytes: its weights in memory.
        questions: how many it was measured on.
        first_tokens, answers: for how many of them the first token, and the answer, was the same.
        first_tokens_interval, answers_interval: 95 % intervals of the two shares (Wilson), 0..1.
        keeps: whether both shares are large enough.
        recipe, budget: of the cheapest that with these bits keeps enough too, and its share of the stale tokens; prefix if none does.
    """

    bits: str
    bytes: int
    questions: int
    first_tokens: int
    answers: int
    first_tokens_interval: tuple[float, float]
    answers_interval: tuple[float, float]
    keeps: bool
    recipe: str = EXACT
    budget: float = 0.0

    @property
    def told(self) -> str:
        """Return what it keeps, for people."""
        first, answers = (
            f"{kept / max(1, self.questions):.0%} of {what} (95 % interval {low:.0%} to {high:.0%})"
            for what, kept, (low, high) in (
                ("first tokens", self.first_tokens, self.first_tokens_interval),
                ("answers", self.answers, self.answers_interval),
            )
        )
        return f"of {self.questions} questions {self.bits} keeps {first} and {answers} in {_size(self.bytes)}"


@dataclass(frozen=True, slots=True)
class TriedWeights:
    """The trials of fewer bits, and what they are compared with.

    Attributes:
        own: the bits of the knowledge base's model: full, int8 or int4.
        own_bytes: its weights in memory.
        trials: from the most to the fewest bits.
    """

    own: str
    own_bytes: int
    trials: tuple[WeightsTrial, ...]

    @property
    def best(self) -> WeightsTrial | None:
        """The fewest bytes that keep enough; of equal ones the most bits. None if no trial does, or none has fewer bytes."""
        keeping = [trial for trial in self.trials if trial.keeps and trial.bytes < self.own_bytes]
        return min(keeping, key=lambda trial: trial.bytes, default=None)

    def told(self, first_tokens: float, answers: float) -> str:
        """Return one line for people: what to do, and why.

        Args:
            first_tokens, answers: the least shares that had to be kept, 0..1.
        """
        enough = f"{first_tokens:.0%} of first tokens and {answers:.0%} of answers"
        best, own = self.best, f"{self.own} weights in {_size(self.own_bytes)}"
        if best is not None:
            return (
                f"{best.bits} weights are the cheapest that keep {enough}: {best.told} instead of {_size(self.own_bytes)}, and "
                f"{at_ratio(best.recipe, best.budget)} is the cheapest recipe that keeps enough with them; `kvweave add PATHS --weights {best.bits} --kb "
                f"NAME` makes a knowledge base that has them, and this one keeps its {self.own} weights, since its stored KV, answers "
                "and conversations are of them"
            )
        tried = "; ".join(trial.told for trial in self.trials)
        if any(trial.keeps for trial in self.trials):
            return f"what keeps {enough} takes no less memory than {own}: {tried}"
        return f"no fewer bits that were tried keep {enough}, so stay with {own}: {tried}"


def tried_weights(stored: Mapping[str, Any] | None) -> TriedWeights | None:
    """Return what `dataclasses.asdict` and JSON made of it; None where nothing was stored."""
    if stored is None:
        return None
    trials = []
    for trial in stored["trials"]:
        intervals = {name: tuple(trial[name]) for name in ("first_tokens_interval", "answers_interval")}
        trials.append(WeightsTrial(**{**trial, **intervals}))
    return TriedWeights(stored["own"], stored["own_bytes"], tuple(trials))


def at_ratio(recipe: str, budget: float) -> str:
    """Name a recipe, with the share of the stale tokens that it recomputes unless that is 0."""
    return f"{recipe} at ratio {budget:g}" if budget else recipe


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
