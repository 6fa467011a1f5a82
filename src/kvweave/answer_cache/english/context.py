"""Finds the question in a text that also speaks of asking itself: "Sorry, a quick question. Who opens the shop?"

Whatever else is said may change the answer and stays in the question: who asks, what for, a condition, a name, a number.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

_SENTENCE_END: Final = re.compile(
    r"(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\bNo)(?<!\bProf)(?<=[.?!])\s+(?=\w)"
)
_BEFORE_COLON: Final = re.compile(r"^([^?.!:]{8,160}?)(?:,? so)?: (?=\w)")
_NAME_OR_NUMBER: Final = re.compile(r"\d|(?<=[\w,;:] )(?!I\b)[A-Z]")
_DECISIVE: Final = frozenset(
    "not no never nothing only mean meant except other another instead rather unless without two three four five six seven eight nine "
    "ten eleven twelve second last".split()
)
_WORD: Final = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_QUESTION_START: Final = re.compile(
    r"(?:(?:at|by|in|on|to|for|from|with|of|under|since|until) )?(?:who|whom|whose|what|which|when|where|why|how)\b",
    re.I,
)
_SIGN: Final = re.compile(r"[^\w\s.,;:!?'\"-]")
_ABOUT_ASKING: Final = frozenset(
    "sorry apologies pardon excuse hello hi hey thanks thank question questions ask asks asked asking wonder wondering wondered "
    "curious check checking checked remember remind forgot forget forgotten know knows answer help need want look looking looked tell "
    "quick quickly short simple silly urgent asap sure bother bothering".split()
)
_BESIDE_THEM: Final = frozenset(
    "i i'm i've i'd i'll me my we we're we've we'd us our you you're your a an the it this that am is are was were be been do does did "
    "have has had can can't could couldn't don't would will may might must should just please so and but to again really very "
    "like one more there up".split()
)
"""Words that say nothing by themselves, and may stand beside those about asking."""

_MEANT: Final = frozenset("it it's he him she they them this these those ones such so then".split())
"""Words that a question most often uses for what was said before it, rather than in it."""

_POINTS_BACK: Final = frozenset(
    "it its it's they them their theirs he him his she her hers this that these those there one ones such so then".split()
)


@lru_cache(maxsize=4096)
def questions_in(text: str) -> tuple[str, ...]:
    """Return a cleaned text, and the question in it without the context that it is asked in, if there is such."""
    core = _without_context(text)
    return (text, core) if core and core != text else (text,)


def _without_context(text: str) -> str:
    """Return the question of a text if all the rest is about asking; else an empty text."""
    sentences = [sentence for sentence in _SENTENCE_END.split(text) if sentence]
    asked = [sentence for sentence in sentences if sentence.endswith("?")]
    if len(sentences) > 4 or len(asked) > 1:
        return ""
    core = asked[0] if asked else next(filter(_QUESTION_START.match, sentences), "")
    contexts = [sentence for sentence in sentences if sentence != core]
    if before := _BEFORE_COLON.match(core):
        contexts.append(before[1])
        core = core[before.end() :]
    if not core or not contexts or not all(_changes_nothing(context, core) for context in contexts):
        return ""
    return core[:1].upper() + core[1:]


def _changes_nothing(context: str, core: str) -> bool:
    """Return whether a context is about asking alone, and the question does not refer to it."""
    words, asked = (set(_words(part)) for part in (context, core))
    if not words <= _ABOUT_ASKING | _BESIDE_THEM or _SIGN.search(context):
        return False
    about = words & _ABOUT_ASKING
    return bool(about) and about.isdisjoint(asked) and _POINTS_BACK.isdisjoint(asked)


def _words(text: str) -> Iterator[str]:
    return (word.lower() for word in _WORD.findall(text))
