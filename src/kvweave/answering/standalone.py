"""Decides whether a question in a conversation can be understood without what was said before.

Only such a question may be answered from the answer cache, which knows nothing of a conversation. A wrong yes gives a wrong
answer; a wrong no only computes one. So everything here says no unless the question names what it is about. Reads English;
a question in another language leans on its conversation. Loads no model, and raises for no text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvweave.languages import ENGLISH, language_of

_WORD: Final = re.compile(r"[^\W_]+(?:[-'’.&/][^\W_]+)*", re.UNICODE)
_POLITE: Final = re.compile(
    r"^(?:please\s+)?(?:(?:can|could|would|will)\s+you\s+(?:please\s+)?)?"
    r"(?:(?:tell|give|show|remind)\s+me\s+)?(?:please\s+)?",
    re.IGNORECASE,
)
_SENTENCE_END: Final = re.compile(r"[.!?…]\s+\S|[\n\r;]")
_QUOTED: Final = re.compile(r"[\"“«„]([^\"”»“]{2,})[\"”»“]")

_BE: Final = frozenset("is are was were".split())
_AUXILIARY: Final = _BE | frozenset(
    "do does did has have had can could may might must should will would shall".split()
)
_INTERROGATIVE: Final = frozenset("who whom whose what which when where why how".split())
_PREPOSITION: Final = frozenset("of for in on at from to with by about between under over into".split())
_LEANS: Final = frozenset(
    # What stands for something that was named before
    "it its it's itself they them their theirs themselves they're he him his himself he's she her hers herself she's this "
    "that that's these those one ones there there's here then thus such same another other others else former latter both "
    "either neither each all any some none most many few several enough everything everyone anything anyone something "
    "someone nothing thing things "
    # What continues or compares
    "again also too still yet instead besides otherwise therefore however anyway next last previous above below earlier "
    "later before after afterwards following remaining rest more less further already just exactly really actually even "
    "only not "
    # The speakers, and what they said
    "i i'm i've me my mine myself we we're us our ours you you're your yours mean meant mentioned said told asked answer "
    "question sure right correct why's".split()
)
_OPENS_FURTHER: Final = frozenset(
    "and but or so because though although yes no ok okay well now thanks thank hmm if".split()
)
_COMPARATIVE: Final = re.compile(
    r"(?:bigg|small|larg|high|low|old|new|young|long|short|fast|slow|cheap|great|few|soon|farth|deep|wid|strong|weak|heavi|"
    r"light|easi|hard|thick|thin|rich|poor|earli|lat)er|better|worse|than"
)
_DATES: Final = frozenset(
    "monday tuesday wednesday thursday friday saturday sunday january february march april may june july august september "
    "october november december christmas easter".split()
)


@dataclass(frozen=True, slots=True)
class _Words:
    """A question's words: as written, in lower case, and whether each names something."""

    written: tuple[str, ...]
    lower: tuple[str, ...]
    names: tuple[bool, ...]


def stands_alone(question: str, earlier: str) -> bool:
    """Return whether a question means the same without what was said before.

    Args:
        question: any text.
        earlier: everything that was said before it; empty for the first question, which leans on nothing.
    """
    if not earlier.strip():
        return True
    text = question.strip()
    if len(text) > 300 or _SENTENCE_END.search(text):
        return False
    words = _words(_POLITE.sub("", text, count=1))
    if len(words.lower) < 3 or language_of(words.lower) != ENGLISH or _leans(words.lower):
        return False
    if not any(words.names) or _has_bare_definite(words):
        return False
    return _is_complete(words) or _is_about_something_new(words, earlier)


def _words(text: str) -> _Words:
    quoted = [found.span(1) for found in _QUOTED.finditer(text)]
    found = list(_WORD.finditer(text))
    names = tuple(
        any(start <= each.start() < end for start, end in quoted) or (at > 0 and _is_name(each.group()))
        for at, each in enumerate(found)
    )
    written = tuple(each.group().replace("’", "'") for each in found)
    return _Words(written, tuple(each.lower() for each in written), names)


def _is_name(word: str) -> bool:
    """Return whether a word inside a question names something: a capital letter, or letters with a digit; no date."""
    lower = word.lower()
    if lower in _DATES or lower.removesuffix("'s") in _DATES:
        return False
    letters, digits = any(map(str.isalpha, word)), any(map(str.isdigit, word))
    return any(map(str.isupper, word)) or (letters and digits)


def _leans(lower: Sequence[str]) -> bool:
    """Return whether a word stands for something that was said, or the words are no whole question."""
    if lower[0] in _OPENS_FURTHER or any(word in _LEANS or _COMPARATIVE.fullmatch(word) for word in lower):
        return True
    if lower[0] in _INTERROGATIVE and lower[1] in ("about", "of", "if", "come", "else", "for", "in", "on"):
        return True
    return not (_asks(lower) and _has_verb(lower))


def _asks(lower: Sequence[str]) -> bool:
    first = lower[0]
    asked = (
        first in _INTERROGATIVE
        or first in _AUXILIARY
        or first in ("the", "list", "name", "explain", "describe")
    )
    return asked or (first in _PREPOSITION and lower[1] in _INTERROGATIVE)


def _has_verb(lower: Sequence[str]) -> bool:
    """Return whether there is a verb: an auxiliary, that of "Who wrote", or the request for "the N of …"."""
    who = lower[0] == "who" and lower[1] not in _PREPOSITION
    requested = lower[0] not in _INTERROGATIVE and lower[0] not in _PREPOSITION
    return who or requested or any(word in _AUXILIARY for word in lower[1:])


def _has_bare_definite(words: _Words) -> bool:
    """Return whether "the N" is neither named nor followed by "of" and a name: it was introduced before."""
    return any(word == "the" and not _is_named(words, at + 1) for at, word in enumerate(words.lower))


def _is_named(words: _Words, start: int) -> bool:
    """Return whether the noun phrase from `start` on has a name in it, or in what follows it after prepositions."""
    for at in range(start, len(words.lower)):
        if words.names[at]:
            return True
        if words.lower[at] in _AUXILIARY or words.lower[at] in _INTERROGATIVE:
            return False
        if words.lower[at] in _PREPOSITION and words.lower[at] != "of":
            return False
    return False


def _is_complete(words: _Words) -> bool:
    """Return whether the question is one of the forms that leave nothing out.

    They are "What is [the] N of NAME", "What is NAME's N", "What is NAME", "Who VERB NAME", and the request for "the N of
    NAME"; nothing follows the name.
    """
    lower, names = words.lower, words.names
    first = next(at for at, named in enumerate(names) if named)
    possessive = words.written[first].endswith("'s")
    if not (all(names[first:]) or possessive):
        return False
    if possessive and len(lower) - first > 3:
        return False
    if lower[0] in ("what", "who", "where") and lower[1] in _BE:
        between = lower[2:first]
        return not between or between[-1] == "of" or (between[-1] == "the" and "of" in between)
    if lower[0] == "who" and lower[1] not in _AUXILIARY:
        return first == 2
    return lower[0] == "the" and lower[first - 1] == "of"


def _is_about_something_new(words: _Words, earlier: str) -> bool:
    """Return whether the question is rich, and nothing that it is about was mentioned before."""
    from kvweave.languages import function_words

    known = function_words()[ENGLISH] | _AUXILIARY | _INTERROGATIVE | _PREPOSITION
    content = {_stem(word) for word in words.lower if word not in known}
    mentioned = {_stem(each.group().lower()) for each in _WORD.finditer(earlier)}
    return len(content) >= 3 and not content & mentioned


def _stem(word: str) -> str:
    """Return what a word's forms begin with."""
    return word.removesuffix("'s")[: max(4, len(word) - 3)]
