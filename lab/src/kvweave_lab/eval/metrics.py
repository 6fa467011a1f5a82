"""How an answer is judged: metrics against reference answers, and faithfulness to its context.

The metrics are those of RULER's and LongBench's evaluation scripts, except for `words_match_…`. Knows no data sets;
readers and tasks say which metric belongs to which.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Protocol

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.text_similarity import code_similarity, f1, f1_zh, normalized, rouge_l, rouge_l_zh

Metric = Callable[[str, Sequence[str]], float]
"""Maps a prediction and reference answers to a score, 0..1; each metric decides what several references mean."""

Similarity = Callable[[str, str], float]
"""Maps a prediction and one reference to a score, 0..1."""

_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"\d+")


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the share of the references that the prediction contains, ignoring case (RULER)."""
    return sum(_found(prediction, references)) / len(references)


def words_match_all(prediction: str, references: Sequence[str]) -> float:
    """Return the share of the references that the prediction contains as whole words, ignoring case."""
    text = prediction.lower()
    whole = (rf"(?<![\w-]){re.escape(reference.lower())}(?![\w-])" for reference in references)
    return sum(re.search(pattern, text) is not None for pattern in whole) / len(references)


def words_match_last(prediction: str, references: Sequence[str]) -> float:
    """Return words_match_all of the text after the prediction's last comma: the steps before it are not judged."""
    return words_match_all(prediction.rpartition(",")[2], references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the prediction contains any reference, ignoring case, else 0 (RULER, question answering)."""
    return float(any(_found(prediction, references)))


def best(similarity: Similarity) -> Metric:
    """Return a metric: the similarity to the most similar reference."""

    def metric(prediction: str, references: Sequence[str]) -> float:
        return max(similarity(prediction, reference) for reference in references)

    return metric


def first_line(metric: Metric) -> Metric:
    """Return a metric that judges the prediction's first non-empty line only."""

    def of_first_line(prediction: str, references: Sequence[str]) -> float:
        return metric(prediction.lstrip("\n").split("\n")[0], references)

    return of_first_line


def classification(prediction: str, references: Sequence[str]) -> float:
    """Return 1 over the number of classes that the prediction names, 0 if the right one is not among them (LongBench).

    `references` come from `with_classes`. Named classes that are part of the right one's name do not count. As in
    LongBench's script, a class that directly follows such a class in the list counts nevertheless.
    """
    end = list(references).index("")
    named = [label for label in references[end + 1 :] if label in prediction]
    return max(_share_of_named(right, named) for right in references[:end])


def with_classes(references: Sequence[str], classes: Sequence[str]) -> tuple[str, ...]:
    """Return the references of `classification`: the right classes, an empty string, all classes in their order."""
    return (*references, "", *classes)


def _share_of_named(right: str, named: Sequence[str]) -> float:
    counted = list(named)
    position = 0
    while position < len(counted):
        if counted[position] in right and counted[position] != right:
            del counted[position]  # the next one moves here and is skipped below, as in LongBench's script
        position += 1
    return 1 / len(counted) if right in counted else 0.0


def _exact(prediction: str, reference: str) -> float:
    return float(normalized(prediction) == normalized(reference))


def _count(prediction: str, reference: str) -> float:
    """Return the share of the prediction's numbers that equal the reference; 0 without a number."""
    numbers: list[str] = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def _retrieval(label: str) -> Similarity:
    """Return a similarity: the share of the prediction's numbers that equal the number after `label` in the reference."""

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
"""Every metric by name.

`_first_line` metrics and `classification` judge the first line only, as LongBench's script does for their data sets:
what follows is usually a further example that the model made up."""

_PART = re.compile(r"[,;\n]+")
_WORD = re.compile(r"\w+(?:-\w+|(?<=\d)\.\d+)*")  # a UUID and 3.5 are one word each
_LIST_WORDS = 3  # a longer part is a sentence, whose small words are no facts


class Judge(Protocol):
    """Decides how many of an answer's facts its context contains; a judge model has a name and this one method."""

    @property
    def name(self) -> str:
        """Distinguishes its verdicts from another judge's."""
        ...

    def share(self, answer: str, chunks: Sequence[str]) -> float:
        """Return the share of the answer's facts that the chunks contain, 0..1."""


class ContainedFacts:
    """A judge that counts a fact if a chunk contains its word, ignoring case; needs no model.

    Exact on generated tasks, whose values are single words that no other sentence uses. On free text it counts too few
    paraphrases, and too many names and numbers in the wrong place.
    """

    name: ClassVar[str] = "contained facts"

    def share(self, answer: str, chunks: Sequence[str]) -> float:
        """Return the share of `facts(answer)` in the chunks; 0 for an answer without any fact."""
        stated = facts(answer)
        known = {word.lower() for chunk in chunks for word in _WORD.findall(chunk)}
        return sum(fact in known for fact in stated) / len(stated) if stated else 0.0


def facts(answer: str) -> tuple[str, ...]:
    """Return the different values that an answer states, in lower case, in order.

    Up to three words between commas, semicolons and line ends are values. More words are a sentence: its values are
    its numbers and names (words with a digit, or with a capital letter after the first word), or all its words if it
    has neither.
    """
    found: dict[str, None] = {}
    for part in _PART.split(answer):
        words: list[str] = _WORD.findall(part)
        if len(words) > _LIST_WORDS:
            words = [
                word for place, word in enumerate(words) if _has_digit(word) or (place and _has_capital(word))
            ] or words
        found |= dict.fromkeys(word.lower() for word in words)
    return tuple(found)


def _has_digit(word: str) -> bool:
    return any(character.isdigit() for character in word)


def _has_capital(word: str) -> bool:
    return word != word.lower()
