"""What kvweave would add by answers that it gives only after a check, at each bound on their errors.

Pairs have no documents, so only one of the checks is measured: the bound that is learned from verdicts. The other one, that what the
new question retrieves holds the answer, makes fewer of both. The pairs of one part of the stored questions are judged with the
verdicts about the other parts, as if those had been asked before.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvweave.answer_cache.matching import ENGLISH
from kvweave.answer_cache.near_misses import Verdict, least_score
from kvweave.config import AnswersConfig
from kvweave_lab.eval.question_pairs import Pair

BOUNDS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
ALL_NEAR: Final = 1.0
"""The bound of the row for all pairs that are near, whatever the verdicts."""

_PARTS: Final = 5


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """What would be accepted with a bound on the errors of checked answers, beside what is accepted as certain.

    Attributes:
        bound: `answer_error_bound`; ALL_NEAR for all that is near.
        hits: paraphrases that are accepted after the check alone.
        false_hits: look-alikes that are.
        hit_rate: paraphrases that are accepted, certain ones included, 0..1.
        false_hit_rate: look-alikes that are.
        error: the share of look-alikes among the checked answers, 0..1; 0 without any.
    """

    bound: float
    hits: int
    false_hits: int
    hit_rate: float
    false_hit_rate: float
    error: float


def checked_rows(pairs: Sequence[Pair], cosines: NDArray[np.float64]) -> list[CheckedRow]:
    """Return a row for each bound; `cosines` are those of the pairs, (pairs,)."""
    threshold = AnswersConfig().answer_threshold
    compared = [
        ENGLISH.compare(pair.asked, pair.cached, float(cosine), threshold)
        for pair, cosine in zip(pairs, cosines, strict=True)
    ]
    same = np.array([pair.is_paraphrase for pair in pairs])
    certain = np.array([each.sameness == "same" for each in compared])
    near = np.array([each.sameness == "near" for each in compared])
    kinds = np.array([each.kind for each in compared])
    parts = np.array([_part(pair.cached) for pair in pairs])
    rows = []
    for bound in (*BOUNDS, ALL_NEAR):
        served = near.copy()
        if bound != ALL_NEAR:
            served[:] = False
            for part in range(_PARTS):
                for kind in sorted(set(kinds[near])):
                    known = near & (kinds == kind) & (parts != part)
                    verdicts = [
                        Verdict(float(cosine), bool(agreed))
                        for cosine, agreed in zip(cosines[known], same[known], strict=True)
                    ]
                    least = least_score(verdicts, bound)
                    if least is not None:
                        served |= near & (kinds == kind) & (parts == part) & (cosines >= least)
        hits, false_hits = int((served & same).sum()), int((served & ~same).sum())
        accepted = served | certain
        rows.append(
            CheckedRow(
                bound,
                hits,
                false_hits,
                float(accepted[same].mean()),
                float(accepted[~same].mean()),
                false_hits / max(1, hits + false_hits),
            )
        )
    return rows


def near_pairs(pairs: Sequence[Pair], cosines: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which pairs are the same or near, (pairs,)."""
    threshold = AnswersConfig().answer_threshold
    return np.array(
        [
            ENGLISH.compare(pair.asked, pair.cached, float(cosine), threshold).sameness != "different"
            for pair, cosine in zip(pairs, cosines, strict=True)
        ]
    )


def _part(question: str) -> int:
    return hashlib.blake2b(question.encode(), digest_size=4).digest()[0] % _PARTS
