"""BLEU of an answer, by the package sacrebleu where it is installed (extra `bleu`). Knows no data sets."""

from collections.abc import Callable, Sequence
from functools import cache


def bleu(prediction: str, references: Sequence[str]) -> float | None:
    """Sentence BLEU of an answer against all references, 0..1; None where sacrebleu is not installed.

    Its tokens and smoothing are sacrebleu's own. Only orders that the answer has n-grams of are counted ("effective
    order"), so that an answer of one word scores 1 where it is right.
    """
    score = _scorer()
    return None if score is None else score(prediction, references)


@cache
def _scorer() -> Callable[[str, Sequence[str]], float] | None:
    try:
        from sacrebleu.metrics import BLEU  # optional, so not at the top
    except ImportError:
        return None
    scorer = BLEU(effective_order=True)
    # Its logarithms give a little more than 100 for a match.
    return lambda prediction, references: min(1.0, scorer.sentence_score(prediction, references).score / 100)
