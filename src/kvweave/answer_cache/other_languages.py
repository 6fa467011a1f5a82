"""Recognises questions in languages other than English, which are compared as they are written.

What the English reading would drop or reorder means something else there: "an der Tür", "Was …?", "sie" and "Sie". So such
questions share an answer only when they are the same, letter for letter. Doubt counts as another language: it costs a computation.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Final

from kvweave.answer_cache.english.lexicon import Lexicon
from kvweave.languages import ENGLISH, function_word_counts, function_words

_WORD: Final = re.compile(r"[^\W\d_]+")
_WORDS_WITH_APOSTROPHES: Final = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_OPENING_MARKS: Final = ("\u00bf", "\u00a1")
_GERMAN_VERB: Final = re.compile(
    r"[Ww]as ([^\W\d_A-Z]+(?:t|te|ten|tet|en))\b"
)  # "Was kaufte Anna?" is no "Was Anna …?"
_ALSO_ENGLISH: Final = frozenset(
    "are bent bin con dan den die din dove door due en era fare gates go had ham hat hem hep hoe hut kind main man med men met mind "
    "mine one pod pour sans sea set sin sole son sub sur tan ten tot want war".split()
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


def is_english(text: str, known: Lexicon) -> bool:
    """Return whether a cleaned text may be read as English: nothing tells that it is in another language."""
    if text.startswith(_OPENING_MARKS) or _mostly_in_other_letters(text):
        return False
    words = list(_lower_words(text))
    if len(text.split(maxsplit=2)) > 1 and known.helpers.issuperset(
        text.lower().split()[:2]
    ):  # "Was will Anna?"
        return False
    german = _GERMAN_VERB.match(text)
    if german and german[1] not in known.single_words:
        return False
    counts = function_word_counts(words)
    english = counts.get(ENGLISH, 0)
    foreign = max((count for language, count in counts.items() if language != ENGLISH), default=0)
    alien = [word for word in words if _is_alien(word, known)]
    return not alien or english > max(foreign, len(alien))


def as_written(text: str) -> str:
    """Return what a cleaned question in another language is compared by: all of it but the marks at its end."""
    return text.rstrip(_END) or text


def depends_on_today(text: str) -> bool:
    """Return whether words of another language than English relate a cleaned text to the day when it is asked."""
    return _TODAY_PARTS.search(text) is not None or any(
        word in _TODAY_WORDS for word in _WORD.findall(text.casefold())
    )


def _lower_words(text: str) -> Iterator[str]:
    """Return the words in lower case that are no names: the first one, and those without a capital."""
    if text.isupper():
        text = text.lower()
    for number, word in enumerate(_WORDS_WITH_APOSTROPHES.findall(text)):
        parts = word.split("'")
        for part in parts:
            if (not number or not part[0].isupper()) and (
                len(parts) == 1 or len(part) > 1
            ):  # no s of "Anna's"
                yield part.casefold()


def _is_alien(word: str, known: Lexicon) -> bool:
    """Return whether a word is a function word of other languages alone, or has letters that English words lack."""
    if not word.isascii():
        return True
    return word in _foreign_words() and word not in known.single_words


@cache
def _foreign_words() -> frozenset[str]:
    lists = function_words()
    every = frozenset[str]().union(*(words for language, words in lists.items() if language != ENGLISH))
    return every - lists[ENGLISH] - _ALSO_ENGLISH


def _mostly_in_other_letters(text: str) -> bool:
    letters = [sign for sign in text if sign.isalpha() and not sign.isascii()]
    others = sum(not unicodedata.name(sign, "").startswith("LATIN") for sign in letters)
    return 2 * others > sum(sign.isalpha() for sign in text)
