"""Tells whether a question is in English, and whether its answer depends on the day when it is asked.

A question in another language is compared letter by letter: "an der Tür", "Was …?", "sie" and "Sie" mean something else there than in
English. In case of doubt a question counts as one in another language, which costs a computation.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Final

from kvweave.answer_cache.guard import DEGREES, TIMES
from kvweave.answer_cache.spelling import is_general, is_word
from kvweave.languages import ENGLISH, function_word_counts, function_words
from kvweave.text import HELPERS, LETTERS, NUMBERS_AND_DATES, Word, split_words

_WORDS_WITH_APOSTROPHES: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_OPENING_MARKS: Final = ("\u00bf", "\u00a1")
_GERMAN_VERB: Final = re.compile(
    r"[Ww]as ([^\W\d_A-Z]+(?:t|te|ten|tet|en))\b"
)  # "Was kaufte Anna?" is no "Was Anna …?"
_NOW: Final = frozenset(
    "now currently presently today tonight tomorrow yesterday ago recently lately nowadays upcoming".split()
)
_RELATIVE: Final = frozenset("this next last past previous coming following current".split())
_FEW: Final = frozenset("a an of few couple several".split())
_MOST_OF_TIME: Final = 4  # words of a length of time: "a couple of days"
_MOSTLY: Final = 0.5
"""The share of known words above which a text without function words is English for certain."""

_ALSO_ENGLISH: Final = frozenset(
    "are bent bin car care come comment con dan den die din dove door due en end era fare gates go had ham hat hem hep hoe hut kind main man med men met mind "
    "mine one pod pour sans sea set sin sole son sub sur tan ten till tot want war".split()
)
"""Function words of other languages that are English words too."""

_END: Final = " .?!\u2026\u3002\uff1f\uff01\uff0e\u061f\u06d4\u037e\u0964"
_TODAY_WORDS: Final = frozenset(
    """
    heute morgen gestern vorgestern übermorgen heutige heutigen heutiger gestrige gestrigen morgigen derzeit jetzt neulich kürzlich
    aujourd demain hier maintenant récemment actuellement prochain prochaine dernier dernière
    hoy mañana ayer anteayer ahora recientemente actualmente próximo próxima pasado pasada
    oggi domani ieri adesso recentemente attualmente prossimo prossima scorso scorsa
    hoje amanhã ontem agora recentemente atualmente próxima passada passado
    vandaag gisteren overmorgen eergisteren onlangs tegenwoordig nächste nächsten nächster nächstes letzte letzten letzter letztes
    volgende vorige idag imorgon igår igår nyligen dag går dzisiaj dziś jutro wczoraj dnes zítra včera azi astăzi mâine ieri
    bugün yarın dün ma holnap tegnap tänään huomenna eilen kemarin besok
    сегодня завтра вчера сейчас недавно послезавтра позавчера следующий следующей следующем прошлой прошлом прошлый этой этом
    اليوم غدا غدًا أمس الآن حاليا مؤخرا القادم القادمة الماضي الماضية σήμερα αύριο χθες היום מחר אתמול आज कल
    """.split()
)
_TODAY_PARTS: Final = re.compile(
    "[今明昨][天日早晚年]|现在|現在|最近|目前|[本上下这這][个個]?[周週月]|[今来來先去][週周月年]|[后後前][天年]|刚才|剛才|いま|きょう|あした|きのう"
    "|오늘|내일|어제|지금|이번|다음|지난|วันนี้|พรุ่งนี้|เมื่อวาน|ตอนนี้"
    r"|\b(?:dies(?:e[rnms]?)?|cette?|est[ea]|quest[oa]|deze|dit) (?:woche|monat\w*|jahr\w*|wochenende|morgen|abend|semaine|mois|année|soir|matin"
    r"|semana|mes|año|noche|ano|mês|settimana|mese|anno|sera|week|maand|weekend)\b",
    re.IGNORECASE,
)


@lru_cache(maxsize=1024)
def is_english(text: str) -> bool:
    """Return whether a cleaned text may be English: no word or letter shows another language."""
    if text.startswith(_OPENING_MARKS) or _mostly_in_other_letters(text):
        return False
    words = list(_lower_words(text))
    if len(text.split(maxsplit=2)) > 1 and HELPERS.issuperset(text.lower().split()[:2]):  # "Was will Anna?"
        return False
    german = _GERMAN_VERB.match(text)
    if german and (german[1] in _foreign_words() or not is_general(german[1])):
        return False
    counts = function_word_counts(words)
    english = counts.get(ENGLISH, 0)
    foreign = max((count for language, count in counts.items() if language != ENGLISH), default=0)
    alien = [word for word in words if not word.isascii() or word in _foreign_words()]
    return not alien or english > max(foreign, len(alien))


def as_written(text: str) -> str:
    """Return a cleaned question without the marks at its end."""
    return text.rstrip(_END) or text


@lru_cache(maxsize=1024)
def is_time_sensitive(text: str) -> bool:
    """Return whether a cleaned text relates to the day when it is asked: "today", "next week", "in two days"."""
    if _TODAY_PARTS.search(text) or not _TODAY_WORDS.isdisjoint(LETTERS.findall(text.casefold())):
        return True
    words = split_words(text)
    texts = [word.text for word in words]
    past = not {"did", "was", "were", "had"}.isdisjoint(texts)
    for at, word in enumerate(texts):
        if word in _NOW and texts[at : at + 2] != ["now", "that"]:
            return True
        if word == "in" and not past and _is_from_now(texts, at):
            return True
        if word in _RELATIVE and _is_relative(words, at):
            return True
    return False


def _is_from_now(texts: Sequence[str], at: int) -> bool:
    """Return whether "in" at a place begins a time from now on, such as "in two days"; not in "how many hours are in two days"."""
    length = _length_of_time(texts, at + 1)
    asked = texts[texts.index("how") + 1 :] if "how" in texts[:at] else []
    if length < 2:
        return False
    if not asked or not (asked[0] in ("many", "much") or asked[0] in DEGREES):
        return True
    converted = _singular(asked[min(1, len(asked) - 1)]) in TIMES and (
        texts[at - 1] in HELPERS or texts[at - 1] == "there"
    )
    return not (converted or (length == 2 and texts[at + 1] in ("a", "an", "the")))


def _is_relative(words: Sequence[Word], at: int) -> bool:
    """Return whether a word such as "next" relates a time to the present; "the last week of the term" does not."""
    texts = [word.text for word in words]
    length = _length_of_time(texts, at + 1)
    if not length:
        return False
    whole = texts[at + 1 + length : at + 4 + length]
    return not (
        texts[at] == "last"
        and len(whole) == 3
        and whole[:2] in (["of", "the"], ["of", "a"], ["of", "an"])
        and _singular(whole[2]) not in TIMES
    )


def _length_of_time(texts: Sequence[str], at: int) -> int:
    """Return the number of words from a place on that say a length of time: 2 of "two days", 4 of "a couple of days", or 0."""
    for n, word in enumerate(texts[at : at + _MOST_OF_TIME]):
        if _singular(word) in TIMES:
            return n + 1
        if not (word in _FEW or word in NUMBERS_AND_DATES or word[0].isdigit()):
            break
    return 0


def _singular(word: str) -> str:
    return word.removesuffix("s")


@lru_cache(maxsize=1024)
def is_surely_english(text: str) -> bool:
    """Return whether a cleaned text has more function words of English than of any other language, or mostly English words."""
    words = [word.casefold() for word in LETTERS.findall(text)]
    counts = function_word_counts(words)
    if counts.get(ENGLISH, 0) > max((n for language, n in counts.items() if language != ENGLISH), default=0):
        return True
    english = function_words()[ENGLISH]
    foreign = any(
        word not in english and not is_general(word) and function_word_counts([word]) for word in words
    )
    known = sum(map(is_word, words))
    return not foreign and text.isascii() and known >= _MOSTLY * len(words)


def _lower_words(text: str) -> Iterator[str]:
    """Yield the words in lower case that are not names: the first one, and those without a capital."""
    if text.isupper():
        text = text.lower()
    for number, word in enumerate(_WORDS_WITH_APOSTROPHES.findall(text)):
        parts = word.split("'")
        for part in parts:
            if (not number or not part[0].isupper()) and (
                len(parts) == 1 or len(part) > 1
            ):  # no s of "Anna's"
                yield part.casefold()


@cache
def _foreign_words() -> frozenset[str]:
    """Return the words that are function words of other languages only."""
    lists = function_words()
    every = frozenset[str]().union(*(words for language, words in lists.items() if language != ENGLISH))
    return every - lists[ENGLISH] - _ALSO_ENGLISH


def _mostly_in_other_letters(text: str) -> bool:
    letters = [sign for sign in text if sign.isalpha() and not sign.isascii()]
    others = sum(not unicodedata.name(sign, "").startswith("LATIN") for sign in letters)
    return 2 * others > sum(sign.isalpha() for sign in text)
