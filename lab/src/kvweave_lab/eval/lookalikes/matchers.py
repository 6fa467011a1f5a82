"""What decides whether two questions share an answer, as a score and a threshold: ours, plain cosine, GPTCache's rule.

All of them see the same vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvweave.answer_cache.english.reading import read
from kvweave.answer_cache.matching import same_question
from kvweave.config import AnswersConfig
from kvweave_lab.eval.lookalikes.pairs import Pair

Scores = NDArray[np.float64]
REFUSED: Final = -1.0
"""The score of a pair that no threshold lets through."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """A rule: a pair shares an answer where its score reaches the threshold.

    Attributes:
        name: in tables and figures.
        threshold: the one it comes with.
        score: from pairs and their cosines (pairs,) to scores (pairs,), rising with similarity.
    """

    name: str
    threshold: float
    score: Callable[[Sequence[Pair], Scores], Scores]


def _ours(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    """The cosine where the questions agree when read."""
    agree = [same_question(read(pair.cache_hit), read(pair.asked), 1.0, 1.0) for pair in pairs]
    return np.where(agree, cosines, REFUSED)


def _cosine(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    return cosines


def _gptcache(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    """SearchDistanceEvaluation on FAISS's squared L2 distance of unit vectors, 0..4: (4 - d²) / 4."""
    return 1 - (2 - 2 * cosines) / 4


MATCHERS: Final = (
    Matcher("kvweave", AnswersConfig().answer_threshold, _ours),
    Matcher("cosine", AnswersConfig().answer_threshold, _cosine),
    Matcher("gptcache", 0.8, _gptcache),
)
"""The first is ours. GPTCache's own default embeds with another model (paraphrase-albert): here its rule and its
threshold of 0.8 are applied to the vectors that all matchers see."""
