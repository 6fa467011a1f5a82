"""Decides whether two questions may share an answer: similar vectors, and the same question when normalized.

Vectors alone cannot tell. A question and its negation, or two questions that differ in a name, are often more similar
than two paraphrases. Knows nothing about answers, documents or storage.
"""

from typing import Final, Protocol

from kvweave.answer_cache.english.normalize import difference, normalization_version, normalize
from kvweave.answer_cache.records import Vector


class Matcher(Protocol):
    """A rule for questions that may share an answer."""

    @property
    def version(self) -> int:
        """A number below 2^48 that changes whenever the keys do."""
        ...

    def key(self, question: str) -> str:
        """Return the key that candidates are looked up by: questions that may share an answer have equal ones."""
        ...

    def is_time_sensitive(self, question: str) -> bool:
        """Return whether the answer depends on when the question is asked."""
        ...

    def same(self, question: str, other: str, cosine: float, threshold: float) -> bool:
        """Return whether two questions may share an answer; symmetric.

        Args:
            question: any text.
            other: another one.
            cosine: between their vectors, -1..1.
            threshold: τ, the least cosine of questions that may share an answer (PerCache §4.2.1), 0..1.
        """
        ...


class EnglishMatcher:
    """Compares the normalized form of English questions."""

    @property
    def version(self) -> int:
        """The version of the normalization."""
        return normalization_version()

    def key(self, question: str) -> str:
        """Return the key of the normalized question."""
        return normalize(question).key

    def is_time_sensitive(self, question: str) -> bool:
        """Return whether it holds words such as "today"."""
        return normalize(question).time_sensitive

    def same(self, question: str, other: str, cosine: float, threshold: float) -> bool:
        """Return whether the cosine reaches the threshold and the normalized questions agree."""
        if cosine < threshold:
            return False
        one, two = normalize(question), normalize(other)
        return not (one.time_sensitive or two.time_sensitive) and difference(one, two) is None


ENGLISH: Final[Matcher] = EnglishMatcher()


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of two vectors (dimensions,) of length 1."""
    return float(one @ other)
