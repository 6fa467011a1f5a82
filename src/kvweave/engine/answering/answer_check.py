"""Gives an answer only if the passages hold what it says; else says that the documents do not (setting `check_answers`).

The check goes by words and knows no meaning. It finds what is made up, and questions about names and numbers that are in no
passage; an answer taken from the wrong passage passes.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Final

from kvweave.engine.answering.answer_stream import Answered, Events
from kvweave.predict.filters import content_stems, is_answerable, is_non_answer, is_supported
from kvweave.results import Piece

NOT_FOUND: Final = "The documents do not say."
_YES: Final = frozenset({"yes"})  # "no" is no content word anyway


def only_held(events: Events, question: str) -> Events:
    """Yield an answer's events, its text held back until it is whole: the text, or NOT_FOUND in its place."""
    held = []
    with closing(events):
        while True:
            try:
                event = next(events)
            except StopIteration as end:
                answered: Answered = end.value
                break
            if isinstance(event, Piece):
                held.append(event)
            else:
                yield event
    answer = answered.answer
    if holds(question, answer.text, [source.text for source in answer.sources]):
        yield from held
        return answered._replace(answer=replace(answer, supported=True))
    yield Piece(NOT_FOUND)
    return answered._replace(answer=replace(answer, text=NOT_FOUND, supported=False))


def holds(question: str, answer: str, passages: Sequence[str]) -> bool:
    """Return whether passages hold the names and numbers of a question, and what an answer says beyond it.

    An answer that says nothing beyond its question, such as a bare "yes", passes.
    """
    if is_non_answer(answer) or not is_answerable(question, passages):
        return False
    beyond = content_stems([answer]) - content_stems([question]) - _YES
    return not beyond or is_supported(question, answer, passages)
