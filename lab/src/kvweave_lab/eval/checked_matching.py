"""What kvweave would add by answers that it gives only after a check, at each bound on their errors.

Pairs have no documents, so only one of the checks is measured: the bound that is learned from verdicts. The other one, that what the
new question retrieves holds the answer, makes fewer of both. The pairs of a fifth of the stored questions are judged by the
verdicts about the others, as if those had been asked before.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvweave.answer_cache.matching import ENGLISH, READING, Comparison
from kvweave.answer_cache.near_misses import Verdict, least_score
from kvweave.config import AnswersConfig
from kvweave_lab.eval.question_pairs import Pair

COSINES: Final = (0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
BOUNDS: Final = (0.02, 0.05, 0.1, 0.2, 0.3)

_PARTS: Final = 5

Chosen = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """What would be accepted of what is only near, beside what is accepted as certain.

    Attributes:
        rule: "read alike": what needs no verdicts; "cosine 0.80": all near pairs of at least this cosine; "bound 0.05": what this
            `answer_error_bound` gives.
        hits: paraphrases that are accepted by this rule alone.
        false_hits: look-alikes that are.
        hit_rate: paraphrases that are accepted, certain ones included, 0..1.
        false_hit_rate: look-alikes that are.
        error: the share of look-alikes among the pairs that this rule alone accepts, 0..1; 0 without any.
    """

    rule: str
    hits: int
    false_hits: int
    hit_rate: float
    false_hit_rate: float
    error: float


def checked_rows(pairs: Sequence[Pair], cosines: NDArray[np.float64]) -> list[CheckedRow]:
    """Return a row for each cosine and each bound; `cosines` are those of the pairs, (pairs,)."""
    compared = _compared(pairs, cosines)
    same = np.array([pair.is_paraphrase for pair in pairs])
    certain = np.array([each.sameness == "same" for each in compared])
    near = np.array([each.sameness == "near" for each in compared])
    kinds = np.array([each.kind for each in compared])
    parts = np.array([_part(pair.cached) for pair in pairs])

    def row(rule: str, served: Chosen) -> CheckedRow:
        hits, false_hits = int((served & same).sum()), int((served & ~same).sum())
        accepted = served | certain
        rates = float(accepted[same].mean()), float(accepted[~same].mean())
        return CheckedRow(rule, hits, false_hits, *rates, false_hits / max(1, hits + false_hits))

    def within(bound: float) -> Chosen:
        """Return the near pairs that the bound gives, for each part from the verdicts about the others."""
        served: Chosen = near & (kinds == READING)
        for part in range(_PARTS):
            for kind in sorted({*kinds[near]} - {READING}):
                known = near & (kinds == kind) & (parts != part)
                agreed = zip(cosines[known], same[known], strict=True)
                least = least_score([Verdict(float(cosine), bool(each)) for cosine, each in agreed], bound)
                if least is not None:
                    served |= near & (kinds == kind) & (parts == part) & (cosines >= least)
        return served

    return [
        row("read alike", near & (kinds == READING)),
        *(row(f"cosine {least:.2f}", near & (cosines >= least)) for least in COSINES),
        *(row(f"bound {bound:.2f}", within(bound)) for bound in BOUNDS),
    ]


def near_pairs(pairs: Sequence[Pair], cosines: NDArray[np.float64]) -> Chosen:
    """Return which pairs are the same or near, (pairs,)."""
    return np.array([each.sameness != "different" for each in _compared(pairs, cosines)])


def _compared(pairs: Sequence[Pair], cosines: NDArray[np.float64]) -> list[Comparison]:
    threshold = AnswersConfig().answer_threshold
    return [
        ENGLISH.compare(pair.asked, pair.cached, float(cosine), threshold)
        for pair, cosine in zip(pairs, cosines, strict=True)
    ]


def _part(question: str) -> int:
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % _PARTS
