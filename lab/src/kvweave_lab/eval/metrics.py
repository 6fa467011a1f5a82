"""How an answer is judged: similarity to a reference, metrics against all references, and faithfulness to its context.

The metrics are those of RULER's and LongBench's evaluation scripts, except for `words_match_…`. Similarities are those of
SQuAD and LongBench, constants included, so that scores are comparable with published ones; BLEU comes from the package
sacrebleu. Knows no data sets; readers and tasks say which metric belongs to which.
"""

import importlib
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from types import MappingProxyType
from typing import ClassVar, Protocol

from kvweave.errors import InvalidRequest

_LOG = logging.getLogger(__name__)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
# LongBench's list of Chinese punctuation as ranges; it leaves 《, 〈 and 〉 in.
_CHINESE_MARKS = (
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003), (0x300B, 0x3011),
    (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F), (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F),
    (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
)  # fmt: skip
_WITHOUT_CHINESE_PUNCTUATION = _WITHOUT_PUNCTUATION | {
    mark: None for first, last in _CHINESE_MARKS for mark in range(first, last + 1)
}
_LATIN_OR_CHARACTER = re.compile(r"[A-Za-z0-9]+|\S")


def normalized(text: str) -> str:
    """Return a text in lower case without ASCII punctuation, articles (a, an, the) and repeated spaces, in SQuAD's order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def f1(prediction: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall over normalized words, repeated ones counted; 0 if none is common."""
    return _f1(normalized(prediction).split(), normalized(reference).split())


def f1_zh(prediction: str, reference: str) -> float:
    """Return f1 over `chinese_words`, in lower case and without ASCII and Chinese punctuation."""
    predicted, wanted = (
        [word for raw in chinese_words(text) if (word := _plain_chinese(raw))]
        for text in (prediction, reference)
    )
    return _f1(predicted, wanted)


def rouge_l(prediction: str, reference: str) -> float:
    """Return ROUGE-L's F-measure as LongBench computes it with the package `rouge` 1.0.1.

    Sentences end at each full stop sign, words at white space; case counts. Every pair of a reference's and a
    prediction's sentence contributes the words of one longest common subsequence. Precision and recall are the number of
    *different* contributed words over that of different words in the prediction and in the reference. A text without
    words other than full stops scores 0. (The package fails on sentences whose lengths add up to about 1,000 words, and
    LongBench then counts 0; this function scores them.)
    """
    predicted, wanted = _sentences(prediction), _sentences(reference)
    if not predicted or not wanted:
        return 0.0
    common = {word for theirs in wanted for ours in predicted for word in _common_subsequence(theirs, ours)}
    precision = len(common) / len({word for words in predicted for word in words})
    recall = len(common) / len({word for words in wanted for word in words})
    # 1e-8 as in the package: a match scores 0.999999995.
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, reference: str) -> float:
    """Return rouge_l over `chinese_words`; only an ASCII full stop ends a sentence."""
    return rouge_l(" ".join(chinese_words(prediction)), " ".join(chinese_words(reference)))


def code_similarity(prediction: str, reference: str) -> float:
    """Return the similarity of the answer's first line of code and the reference, 0..1 in steps of 0.01.

    The first line without `, # and // counts; leading empty lines do not. The score is twice the characters in matching
    blocks over all characters (difflib), which is `fuzzywuzzy.fuzz.ratio` without python-Levenshtein. An empty line
    scores 0 unless the reference is empty too.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(sign in line for sign in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def bleu(prediction: str, references: Sequence[str]) -> float | None:
    """Return the sentence BLEU of an answer against all references, 0..1; None if sacrebleu is not installed.

    Tokens and smoothing are sacrebleu's own. Only orders of which the answer has n-grams count ("effective order"), so
    that a right answer of one word scores 1.
    """
    score = bleu_scorer()
    return None if score is None else score(prediction, references)


@cache
def bleu_scorer() -> Callable[[str, Sequence[str]], float] | None:
    """Return a function that scores a prediction by BLEU, 0..1, or None without sacrebleu."""
    try:
        from sacrebleu.metrics import BLEU  # optional, so not at the top
    except ImportError:
        return None
    scorer = BLEU(effective_order=True)
    # Its logarithms yield slightly more than 100 for a match.
    return lambda prediction, references: min(1.0, scorer.sentence_score(prediction, references).score / 100)


def chinese_words(text: str) -> Sequence[str]:
    """Return the words of a Chinese text: those of the package jieba, as in LongBench, if it is installed.

    Without jieba every character is a word, and so is a run of Latin letters and digits. Scores then differ from
    LongBench's table; a warning says so once.
    """
    return segmenter()(text)


@cache
def segmenter() -> Callable[[str], Sequence[str]]:
    """Return the function that cuts Chinese text into words, or into characters where jieba is not installed."""
    try:
        cut: Callable[[str], list[str]] = importlib.import_module("jieba").lcut
    except ImportError:
        _LOG.warning(
            "Chinese is compared by character, since the package jieba is not installed: scores differ from published ones"
        )
        return _LATIN_OR_CHARACTER.findall
    return cut


def _plain_chinese(word: str) -> str:
    return "".join(word.lower().translate(_WITHOUT_CHINESE_PUNCTUATION).split())


def _f1(predicted: Sequence[str], wanted: Sequence[str]) -> float:
    common = (Counter(predicted) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; white space alone between two full stops is a sentence of one empty word."""
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _common_subsequence(wanted: Sequence[str], predicted: Sequence[str]) -> list[str]:
    """Return one longest common subsequence, from its end; of several, the one that the package `rouge` returns.

    Going back from the ends, an equal pair of words is taken. Otherwise the reference loses its last word if that keeps
    more in common, else the prediction does.
    """
    lengths = [[0] * (len(predicted) + 1)]
    for word in wanted:
        above, row = lengths[-1], [0]
        for column, other in enumerate(predicted):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        lengths.append(row)
    common = []
    i, j = len(wanted), len(predicted)
    while i and j:
        if wanted[i - 1] == predicted[j - 1]:
            i, j = i - 1, j - 1
            common.append(wanted[i])
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common


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
