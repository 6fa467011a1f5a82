"""Whether a question in the bank is the one that is asked: near in meaning by its vector, and the same when read.

The vector alone cannot tell: a question and its negation, or two that differ in a name, are nearer to each other than
many a paraphrase. Knows nothing about answers, documents or storage.
"""

import numpy as np

from kvweave.answer_cache.english.reading import NormalizedQuestion, disagreement
from kvweave.answer_cache.records import Vector


def similarity(one: Vector, other: Vector) -> float:
    """The cosine of two vectors (dimensions,) of length 1."""
    return float(np.dot(one, other))


def same_question(
    one: NormalizedQuestion, other: NormalizedQuestion, cosine: float, threshold: float
) -> bool:
    """Whether two questions may share an answer; symmetric.

    Args:
        one: a question, read.
        other: another.
        cosine: between their vectors, -1..1.
        threshold: τ, the least cosine of questions that may share an answer (PerCache §4.2.1), 0..1.
    """
    if one.bound_to_now or other.bound_to_now:
        return False
    return cosine >= threshold and disagreement(one, other) is None
