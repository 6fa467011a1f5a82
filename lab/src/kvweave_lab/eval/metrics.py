"""Every metric by name: an answer and its references to a score from 0 to 1.

Definitions are those of RULER's and LongBench's evaluation scripts, but for `words_match_…`. Knows no data sets; the readers say which
metric belongs to which.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.similarity import code_similarity, f1, f1_zh, normalized, rouge_l, rouge_l_zh

Metric = Callable[[str, Sequence[str]], float]
"""Prediction and reference answers to a score, 0..1; what several references mean is the metric's business."""

Similarity = Callable[[str, str], float]
"""Prediction and one reference to a score, 0..1."""

_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"\d+")


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """RULER: share of the references that stand in the prediction, in any case of letters."""
    return sum(_found(prediction, references)) / len(references)


def words_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that stand in the prediction as whole words, in any case of letters."""
    text = prediction.lower()
    whole = (rf"(?<![\w-]){re.escape(reference.lower())}(?![\w-])" for reference in references)
    return sum(re.search(pattern, text) is not None for pattern in whole) / len(references)


def words_match_last(prediction: str, references: Sequence[str]) -> float:
    """As words_match_all, of what stands behind the prediction's last comma: steps that lead there are not judged."""
    return words_match_all(prediction.rpartition(",")[2], references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """RULER, for question answering: 1 if any reference stands in the prediction, in any case of letters."""
    return float(any(_found(prediction, references)))


def best(similarity: Similarity) -> Metric:
    """The similarity to the reference that is most alike."""

    def metric(prediction: str, references: Sequence[str]) -> float:
        return max(similarity(prediction, reference) for reference in references)

    return metric


def first_line(metric: Metric) -> Metric:
    """The metric of the prediction's first line, empty lines before it left out."""

    def of_first_line(prediction: str, references: Sequence[str]) -> float:
        return metric(prediction.lstrip("\n").split("\n")[0], references)

    return of_first_line


def classification(prediction: str, references: Sequence[str]) -> float:
    """LongBench: 1 over the number of classes that the prediction names, 0 if the right one is not among them.

    `references` come from `with_classes`. Named classes that are part of the right one's name are not counted;
    as in LongBench's script, one that directly follows such a class in the list is counted nevertheless.
    """
    end = list(references).index("")
    named = [label for label in references[end + 1 :] if label in prediction]
    return max(_share_of_named(right, named) for right in references[:end])


def with_classes(references: Sequence[str], classes: Sequence[str]) -> tuple[str, ...]:
    """What `classification` takes as references: the right classes, an empty string, all classes in their order."""
    return (*references, "", *classes)


def _share_of_named(right: str, named: Sequence[str]) -> float:
    counted = list(named)
    position = 0
    while position < len(counted):
        if counted[position] in right and counted[position] != right:
            del counted[
                position
            ]  # the next one moves here and is passed over below, as in LongBench's script
        position += 1
    return 1 / len(counted) if right in counted else 0.0


def _exact(prediction: str, reference: str) -> float:
    return float(normalized(prediction) == normalized(reference))


def _count(prediction: str, reference: str) -> float:
    """Share of the prediction's numbers that are the reference; 0 without a number."""
    numbers: list[str] = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def _retrieval(label: str) -> Similarity:
    """Share of the prediction's numbers that are the number behind `label` in the reference."""

    def similarity(prediction: str, reference: str) -> float:
        paragraph = re.search(label + r"(\d+)", reference)
        if paragraph is None:
            raise InvalidRequest(
                f"the reference answer {reference!r} names no paragraph; it must hold {label!r} and a number"
            )
        return _count(prediction, paragraph[1])

    return similarity


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    text = _CONTROL.sub("\n", prediction.strip()).lower()  # RULER's own preparation
    return [reference.lower() in text for reference in references]


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "string_match_all": string_match_all,
        "string_match_part": string_match_part,
        "words_match_all": words_match_all,
        "words_match_last": words_match_last,
        "exact_match": best(_exact),
        "f1": best(f1),
        "f1_first_line": first_line(best(f1)),
        "f1_zh": best(f1_zh),
        "rouge_l": best(rouge_l),
        "rouge_l_first_line": first_line(best(rouge_l)),
        "rouge_l_zh": best(rouge_l_zh),
        "classification": first_line(classification),
        "retrieval": best(_retrieval("Paragraph ")),
        "retrieval_zh": best(_retrieval("段落")),
        "count": best(_count),
        "code_similarity": best(code_similarity),
    }
)
"""Every metric. `_first_line` ones and `classification` look at the first line only, as LongBench's script does for
the data sets that use them: what follows is usually a further example that the model made up."""
