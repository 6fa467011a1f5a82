"""Similarity of an answer and a reference: common words, longest common subsequence, characters, BLEU.

The definitions are those of SQuAD and LongBench, constants included, so that scores are comparable with published ones.
BLEU comes from the package sacrebleu. Knows no data sets.
"""

import importlib
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import cache

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
    score = _scorer()
    return None if score is None else score(prediction, references)


@cache
def _scorer() -> Callable[[str, Sequence[str]], float] | None:
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
    return _segmenter()(text)


@cache
def _segmenter() -> Callable[[str], Sequence[str]]:
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
