"""Finds the question in a text that also says why it is asked: "Sorry, one more for the minutes. Who opens the shop?"

What may change the answer stays in the question: who the person is who asks, a condition, a name, a number. In doubt there
is no context.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from kvweave.answer_cache.english.lexicon import lexicon
from kvweave.languages import ENGLISH, function_words

_SENTENCE_END: Final = re.compile(
    r"(?<!\bMr)(?<!\bMs)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\bNo)(?<!\bProf)(?<=[.?!])\s+(?=\w)"
)
_BEFORE_COLON: Final = re.compile(r"^([^?.!:]{8,160}?)(?:,? so)?: (?=\w)")
_WORD: Final = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_QUESTION_START: Final = re.compile(
    r"(?:(?:at|by|in|on|to|for|from|with|of|under|since|until) )?(?:who|whom|whose|what|which|when|where|why|how)\b",
    re.I,
)
_ABOUT_THE_QUESTION: Final = re.compile(
    r"\b(?:sorry|question|ask(?:s|ed|ing)?(?! for (?!it|this|that))|wonder\w*|asap|remind|help me out|hence|argu(?:e|es|ed|ing)|bet"
    r"|look (?:it|this|that) up|look(?:ed|ing)? (?:this|it|that) up|check|one more|quick one|forgot|remember|not sure"
    r"|(?:need|want|require)s? (?:it|this|that|to know|the answer|an answer|one (?:sentence|line|word))"
    r"|for (?:the|my|our|a|an) (?:[\w'-]+ ){0,3}(?:note|notes|card|letter|form|report|release|newsletter|poster|invitation|invite"
    r"|e-?mail|mail|message|minutes|list|article|programme|booklet|presentation|slides?|speech|book|records|summary|agenda|blog))\b",
    re.I,
)
_DOING: Final = re.compile(
    r"^(?:and |but |so |as )?(?:i|we)(?:'m| am|'re| are) (?:just |still |currently |now |already )?(?!going\b)\w+ing\b",
    re.I,
)
_MAY_NARROW: Final = frozenset(
    "only not except without unless if instead other others another different mean meant besides especially particularly specifically "
    "assuming suppose supposing provided case both each every all any no never none half otherwise rather but than before after until "
    "since during while when once where whether same also too second last next previous old new about regarding concerning".split()
)
_POINTING: Final = re.compile(r"\b(?:about (?:it|this|that)|one more|one (?:sentence|line|word))\b|[,.!;]")
_FIRST_PERSON: Final = frozenset(
    "i me my mine we us our ours myself ourselves i'm i've i'd i'll we're we've".split()
)
_POINTS_BACK: Final = frozenset(
    "it its it's they them their theirs he him his she her hers this that these those there one ones such so then".split()
)


@lru_cache(maxsize=4096)
def questions_in(text: str) -> tuple[str, ...]:
    """Return a cleaned text, and the question in it without the context that it is asked in, if there is such."""
    core = _without_context(text)
    return (text, core) if core and core != text else (text,)


def _without_context(text: str) -> str:
    """Return the question of a text if all the rest says why it is asked; else an empty text."""
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
    """Return whether a context only tells why a question is asked."""
    words, asked = (list(_words(part)) for part in (context, core))
    if any(letter.isdigit() for letter in context):
        return False
    if not _MAY_NARROW.isdisjoint(_POINTING.sub("", context.lower()).split()):
        return False
    if any(word[0].isupper() and word.split("'")[0] != "I" for word in _WORD.findall(context)[1:]):
        return False  # a name
    content = set(words) - function_words()[ENGLISH] - lexicon().function_words
    if not content.isdisjoint(asked) or not _POINTS_BACK.isdisjoint(asked):
        return False
    if _ABOUT_THE_QUESTION.search(context):
        return True
    return _DOING.match(context) is not None and _FIRST_PERSON.isdisjoint(asked)


def _words(text: str) -> Iterator[str]:
    return (word.lower() for word in _WORD.findall(text))
