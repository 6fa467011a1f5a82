"""How much of a predicted question is computed ahead (PerCache §4.3.2): its prefill alone, or its answer too."""

from typing import Literal, TypeAlias

Extent: TypeAlias = Literal["prefill", "answer"]


def extent(threshold: float, cutoff: float) -> Extent:
    """With τ above the cutoff few questions will be near enough to a stored one, and decoding would be in vain.

    Args:
        threshold: τ, the least similarity of questions that share an answer, 0..1.
        cutoff: the highest τ at which answers are computed ahead, 0..1.
    """
    return "answer" if threshold <= cutoff else "prefill"
