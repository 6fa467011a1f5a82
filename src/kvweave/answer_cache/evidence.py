"""Parses predicted questions from a model's reply, and filters out those that are not worth an answer.

The filters compare words. In case of doubt they drop a question, a summary or an answer, which costs only its prediction.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from kvweave.languages import function_word_counts, language_of
from kvweave.text import WORD, content_stems, content_words, is_negated, lower_words, names, stem, stems

NEAR_DUPLICATE_COSINE: Final = 0.97
"""Least cosine of questions that differ in a word or two only, provided they contain the same names and numbers."""

ASKING: Final = frozenset(
    """time hour date day weekday month year place location reason price cost person people name number age size height distance weight speed
    width depth length duration frequency amount colour color shape kind type title role
    start begin end finish leave depart arrive happen occur need require show become mean use find get give take make keep hold
    call include contain offer decide choose plan schedule describe explain mention say tell know
    old big tall high far heavy fast wide deep long often many""".split()
)
"""Words that a question may have although the documents do not."""

_BULLET: Final = re.compile(r"^\s*(?:[-*•–]+|\(?\d{1,2}[.):]|[Qq](?:uestion)?\s*\d{0,2}\s*[.:)])\s*")
_AROUND: Final = " \t\"'*_`“”‘’"
_MIN_WORDS, _MAX_WORDS = 3, 40  # of a question
_PRONOUNS: Final = frozenset("he she they him them his her their this these those".split())
_SENTENCE_END: Final = re.compile(r"[.!?\n]+(?=\s|$)")
_MAX_LOOP_WORDS: Final = 12
_MOST_TIMES: Final = 2  # that one content word occurs in a question
_MOST_DOUBLED: Final = 1 / 3  # of the sentences of a summary
_MOST_UNKNOWN: Final = 1 / 3  # of the content words of a summary
_LEAST_SUPPORTED: Final = 0.7  # of the content words of an answer
_NO_ANSWER: Final = re.compile(
    r"""\b(?:(?:is|are|was|were|does|do|did)(?:\s+not|n['’]t)\s+(?:\w+\s+){0,2}?
            (?:mention|state|specif|provide|given|contain|say|include|indicate|available|clear)\w*
        | no\s+(?:information|mention|answer|details?)
        | (?:do|does)(?:\s+not|n['’]t)\s+know | not\s+(?:enough|sufficient)\s+information
        | (?:can\s?not|can['’]t|unable\s+to)\s+(?:be\s+)?(?:answer|determin|find|found|tell)\w*
        | not\s+(?:mentioned|stated|specified|provided|known)
        | unknown)""",
    re.IGNORECASE | re.VERBOSE,
)


def parse_questions(reply: str, most: int) -> list[str]:
    """Return the first questions of a reply, each once, without bullets, numbers and quotes; other text is left out."""
    found: dict[str, str] = {}
    for line in reply.splitlines():
        *ended, _ = line.split("?")
        for part in ended:
            question = " ".join(f"{_BULLET.sub('', part, count=1).strip(_AROUND)}?".split())
            if _MIN_WORDS <= len(WORD.findall(question)) <= _MAX_WORDS:
                found.setdefault(question.casefold(), question)
    return list(found.values())[:most]


def is_near_duplicate(one: str, other: str, cosine: float) -> bool:
    """Return whether two questions of this similarity (-1..1) have the same names, numbers and negation; symmetric."""
    same = names(one) == names(other) and is_negated(one) == is_negated(other)
    return cosine >= NEAR_DUPLICATE_COSINE and same


def is_answerable(question: str, chunks: Iterable[str]) -> bool:
    """Return whether the chunks contain every name and number of the question, and one of its other content words."""
    words, named = lower_words(chunks), names(question)
    content = content_words(question) - named
    if not content:
        return bool(named) and named <= words
    return named <= words and bool(set(map(stem, content)) & set(map(stem, words)))


def repeats(text: str) -> bool:
    """Return whether a text repeats words, phrases or sentences, as the texts of small models do."""
    if _loops([word.casefold() for word in WORD.findall(text)]):
        return True
    sentences = [
        " ".join(WORD.findall(part)).casefold() for part in _SENTENCE_END.split(text) if part.strip()
    ]
    if len(sentences) == 1:
        said = content_words(sentences[0])
        content = Counter(word for word in sentences[0].split() if word in said)
        return max(content.values(), default=0) > _MOST_TIMES
    return len(sentences) - len(set(sentences)) > len(sentences) * _MOST_DOUBLED


def is_unclear(question: str) -> bool:
    """Return whether a question is about a person or thing that it does not name: "When did he leave?"."""
    return not _PRONOUNS.isdisjoint(lower_words([question])) and not names(question)


def unknown_words(text: str, chunks: Iterable[str]) -> frozenset[str]:
    """Return the content words of a text that occur in no chunk, in lower case and without regard to common endings."""
    known = stems(chunks)
    return frozenset(word for word in content_words(text) if stem(word) not in known)


def is_invented(summary: str, chunks: Sequence[str]) -> bool:
    """Return whether too many content words of a summary are missing in its chunks."""
    content = content_words(summary)
    return len(unknown_words(summary, chunks)) > _MOST_UNKNOWN * len(content)


def names_answer(question: str, answer: str) -> bool:
    """Return whether a question contains the answer that it was made for, so that it asks for something else: "Who is Dr Pyne?"."""
    said = content_stems([answer])
    return bool(said) and said <= content_stems([question])


def is_other_language(text: str, chunks: Iterable[str]) -> bool:
    """Return whether the function words of a text are of another language than those of chunks; False without function words."""
    words = [word.casefold() for word in WORD.findall(text)]
    counts = function_word_counts(words)
    usual = language_of(word.casefold() for chunk in chunks for word in WORD.findall(chunk))
    return bool(counts) and usual is not None and counts.get(usual, 0) < max(counts.values())


def is_supported(question: str, answer: str, chunks: Sequence[str]) -> bool:
    """Return whether chunks contain what an answer adds to its question: every name and number, and most other words.

    An answer that adds nothing, such as a bare "yes", cannot be checked.
    """
    asked, known, exact = stems([question]), stems(chunks), lower_words(chunks)
    said = {word: stem(word) for word in content_words(answer) if stem(word) not in asked}
    decisive = {word for word in said if any(map(str.isdigit, word))} | (names(answer) & said.keys())
    if not said or not decisive <= exact:
        return False
    return sum(each in known for each in said.values()) >= _LEAST_SUPPORTED * len(said)


def is_non_answer(answer: str) -> bool:
    """Return whether an English answer is empty or says that the answer is not known."""
    return not answer.strip() or _NO_ANSWER.search(answer) is not None


def _loops(words: Sequence[str]) -> bool:
    """Return whether a word follows itself, or a phrase follows itself twice."""
    for length in range(1, _MAX_LOOP_WORDS + 1):
        run, enough = 0, 1 if length == 1 else 2 * length
        for at in range(length, len(words)):
            run = run + 1 if words[at] == words[at - length] else 0
            if run >= enough:
                return True
    return False
