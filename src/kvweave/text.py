"""What the spelling of an English text tells: its words, names, numbers, dates and negations. Knows no meaning."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

WORD: Final = re.compile(r"\w+(?:[.,:/-]\d+)*")
"""A word, or a number with what is inside it, such as 1,200 or 14:30."""

LETTERS: Final = re.compile(r"[^\W\d_]+")
"""A word of letters alone."""

OWNER: Final = "'s"
"""The possessive ending, which `split_words` makes a word of its own."""

QUESTION_WORDS: Final = ("who", "whom", "whose", "what", "which", "when", "where", "why", "how")
HELPERS: Final = frozenset(
    "am is are was were be been being do does did doing done have has had having can could may might must shall should will would".split()
)
PREPOSITIONS: Final = frozenset(
    "of for at in within inside during on upon from to into onto toward towards by with without about regarding concerning before after "
    "since until till than against between under below beneath over above near behind through via except besides despite per as like "
    "among amongst around across along beyond instead".split()
)
NEGATIONS: Final = frozenset(
    "no not never nobody nothing none nowhere neither nor without hardly cannot".split()
)
FILLERS: Final = frozenset(
    "exactly precisely actually really please just simply also then there that anyway indeed ever respective particular specific so even "
    "quite very mine one".split()
)
TITLES: Final = frozenset("mr mrs ms miss dr prof professor sir uncle aunt auntie".split())

MONTHS: Final = (
    "january february march april may june july august september october november december".split()
)
WEEKDAYS: Final = "monday tuesday wednesday thursday friday saturday sunday".split()
_MONTH_OF: Final = {month[:3]: month for month in MONTHS}
_PLAIN_MONTHS: Final = frozenset(MONTHS) - {"may", "march"}
"""Months that are no other words in small letters."""

SMALL_NUMBERS: Final = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES: Final = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "dozen": 12}
_ORDINALS: Final = (
    "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth".split()
)
_VALUES: Final = {
    **{word: n for n, word in enumerate(SMALL_NUMBERS)},
    **{word: n for n, word in enumerate(_ORDINALS)},
    **{word: 10 * n for n, word in enumerate(TENS, 2)},
    **{f"{word[:-1]}ieth": 10 * n for n, word in enumerate(TENS, 2)},
    **_SCALES,
    **{f"{word}th": value for word, value in _SCALES.items() if word != "dozen"},
}
NUMBERS_AND_DATES: Final = frozenset(
    [*MONTHS, *WEEKDAYS, *_VALUES, "half", "quarter", *"once twice thrice".split()]
)

_MAX_CHARACTERS: Final = 1000
"""A longer text is more than a question. It keeps its characters: Unicode normalization takes time that grows with the square."""

_QUOTES: Final = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "`": "'"})
_RAISED: Final = ("<super>", "<sub>", "<fraction>")
_TOKEN: Final = re.compile(
    rf"""{OWNER}(?!\w)
      | \d{{4}}-\d{{1,2}}-\d{{1,2}} | \d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}      # a date as numbers
      | \d{{1,2}}[:.]\d{{2}}(?=\s*(?:[ap]\.?m\b|h\b|o'clock)) | \d{{1,2}}:\d{{2}}(?::\d{{2}})?
      | (?<!\S)\S[^\s@]*+@\S+\w           # an address; written so that it takes linear time
      | \d+(?:[.,]\d{{3}})*(?:[.,]\d+)?(?:st|nd|rd|th)?(?![\w-])
      | [€$£%]
      | [^\W_]+(?:[-_./'&+#][^\W_]+)*[+#]*(?:\.(?=\w))?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_CONTRACTIONS: Final = (
    (re.compile(r"\bwon't\b", re.I), "will not"),
    (re.compile(r"\bshan't\b", re.I), "shall not"),
    (re.compile(r"\bcan(?:'t|not)\b", re.I), "can not"),
    (re.compile(r"n't\b", re.I), " not"),
    (re.compile(r"'ll\b", re.I), " will"),
    (re.compile(r"'re\b", re.I), " are"),
    (re.compile(r"'ve\b", re.I), " have"),
    (re.compile(r"'m\b", re.I), " am"),
    (re.compile(r"'d\b", re.I), " would"),
    (re.compile(r"\b(what|who|where|when|why|how|which|that|there|it|he|she|this)'s\b", re.I), r"\1 is"),
    (re.compile(r"\b([ap])\.m\b\.?", re.I), r"\1m"),
    (re.compile(r"(?<=\d)(?=(?:am|pm|km|kg|cm|mm)\b)", re.I), " "),
    (re.compile(r"(?<=s)'(?=\s)"), "'s"),  # the guests' rooms
    (re.compile(r"'s\b", re.I), " 's"),
)
_SIGNED_NUMBER: Final = re.compile(
    r"(?:^|[\s(])[-\u2212+]\s?[\d.]|\d\s+[-\u2013]\s+\d|[^\W_][-\u2013](?![\w-])"
)
"""A sign before a number, a difference, or a minus behind a grade: "A-" is not "A"."""

_SIGNS: Final = frozenset({"Mn", "Mc", "Me", "Sm", "So"})
"""Unicode categories of combining marks, of relations and operators, and of pictures."""

_ENDING: Final = re.compile(r"(?:ies|ing|es|ed|s|e|y)$")
_MIN_STEM_LETTERS: Final = 3  # words up to this length have no ending to strip
_STOP_WORDS: Final = frozenset(
    """s t a about after all an and any are as at be been before by can could did do does for from had has have how i if in
    into is it its many me much my of on or our she should some than that the their them there these they this those to
    one ones us was we were what when where which while who whom whose why will with would you your he his her""".split()
)


class Word(NamedTuple):
    """A word of a text.

    Attributes:
        text: in lower case.
        named: whether it is spelled like a name: with a capital inside a sentence, or with digits behind letters.
        comma: whether something other than white space precedes it.
    """

    text: str
    named: bool = False
    comma: bool = False


def clean_text(text: str) -> str:
    """Return a text with straight quotes, single spaces and one form of each character (NFKC)."""
    plain = unicodedata.normalize(_form(text), text) if len(text) <= _MAX_CHARACTERS else text
    return " ".join(plain.translate(_QUOTES).split())


def _form(text: str) -> Literal["NFC", "NFKC"]:
    """Return the Unicode form for a text: NFKC would make 52 of 5\u00b2, and 11/2 of 1\u00bd."""
    raised = not text.isascii() and any(unicodedata.decomposition(sign).startswith(_RAISED) for sign in text)
    return "NFC" if raised else "NFKC"


def split_words(text: str) -> list[Word]:
    """Return the words of a cleaned text with contractions undone."""
    if text.isupper():  # then capitals mark no names
        text = text.lower()
    for contraction, full in _CONTRACTIONS:
        text = contraction.sub(full, text)
    words: list[Word] = []
    end = 0
    for found in _TOKEN.finditer(text):
        word, between = found[0].rstrip("."), text[end : found.start()].strip()
        capital = (words and word[:1].isupper() and word != "I") or any(map(str.isupper, word[1:]))
        code = any(map(str.isdigit, word)) and not word[0].isdigit()
        words.append(Word(word.lower(), bool(capital or code), bool(between)))
        end = found.end()
    return words


def has_symbols(text: str) -> bool:
    """Return whether a cleaned text has signs that mean something beside its words, such as 3 > 2 or -5."""
    rest = _TOKEN.sub(" ", text)
    return bool(_SIGNED_NUMBER.search(text)) or any(
        sign in "*/^\\" or unicodedata.category(sign) in _SIGNS for sign in rest
    )


def numbers(words: Sequence[Word]) -> tuple[str, ...]:
    """Return the numbers, months and weekdays among words in a standard form, sorted; "one" and "first" are left out."""
    found: list[str] = []
    parts = [(part, word.named) for word in words for part in word.text.split("-") if part]
    texts = [text for text, _ in parts]
    for (text, named), before, after in zip(parts, ["", *texts], [*texts[1:], ""], strict=False):
        dated = named or any(map(str.isdigit, before + after)) or text in _PLAIN_MONTHS
        if text[0].isdigit():
            plain = re.sub(r",(?=\d{3}(?:\D|$))|(?:st|nd|rd|th)$", "", text)
            found.append(plain.lstrip("0") or "0")
        elif dated and text in (text[:3], _MONTH_OF.get(text[:3])) and text[:3] in _MONTH_OF:
            found.append(text[:3])
        elif text.removesuffix("s") in WEEKDAYS:
            found.append(text.removesuffix("s"))
        elif text in _VALUES and text not in ("one", "first"):
            if before in TENS and _VALUES[text] < 10:
                found[-1] = str(_VALUES[before] + _VALUES[text])
            else:
                found.append(str(_VALUES[text]))
        elif text in ("half", "quarter", "noon", "midnight"):
            found.append(text)
    return tuple(sorted(found))


def names(text: str) -> frozenset[str]:
    """Return the words with a digit, or with a capital inside the text, in lower case; "I" is not one."""
    words = WORD.findall(text)
    capitals = {word for word in words[1:] if word[0].isupper() and word != "I"}
    return frozenset(
        word.casefold() for word in capitals | {word for word in words if any(map(str.isdigit, word))}
    )


def is_negated(text: str) -> bool:
    """Return whether a text has a word that negates."""
    return not NEGATIONS.isdisjoint(lower_words([text])) or "n't" in text.replace("\u2019", "'")


def lower_words(texts: Iterable[str]) -> set[str]:
    """Return the words of texts in lower case."""
    return {word.casefold() for text in texts for word in WORD.findall(text)}


def content_words(text: str) -> set[str]:
    """Return the words of a text in lower case but for the most common ones and negations."""
    return lower_words([text]) - _STOP_WORDS - NEGATIONS


def stem(word: str) -> str:
    """Return a word without the most common endings, so that "owns" matches "own"."""
    return _ENDING.sub("", word) if len(word) > _MIN_STEM_LETTERS else word


def stems(texts: Iterable[str]) -> set[str]:
    """Return the stems of all words of texts."""
    return set(map(stem, lower_words(texts)))


def content_stems(texts: Iterable[str]) -> set[str]:
    """Return the stems of the content words of texts."""
    return {stem(word) for text in texts for word in content_words(text)}
