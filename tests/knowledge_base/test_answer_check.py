"""An answer that the passages do not hold is not given where the settings ask for that."""

import pytest

from kvweave.answering.answer_stream import Answered
from kvweave.answering.ask import NOT_FOUND, held_by_passages, holds
from kvweave.results import Answer, Piece, Plan, Prefill, Source, Timing
from kvweave.types import TokenizedPrompt

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")
GLORRIC = "What is the password of Glorric?"
PASSAGES = [
    "The boiler was serviced by Hartwell & Sons on 4 March.",
    "It cost £1,240, which Moira paid by cheque.",
]


@pytest.mark.parametrize(
    ("question", "answer", "held"),
    [
        ("Who serviced the boiler?", "Hartwell & Sons", True),
        ("When was the boiler serviced?", "On 4 March.", True),
        ("What did the service cost?", "£1,240", True),
        ("Who paid?", "Moira paid by cheque.", True),
        ("Did Moira pay by cheque?", "Yes.", True),  # nothing that could be checked
        ("Did Moira pay by cheque?", "No.", True),
        ("Who serviced the boiler?", "the boiler", True),
        ("What did the service cost?", "£1,420", False),
        ("When was the boiler serviced?", "On 5 March.", False),
        ("Who serviced the boiler?", "Pendle Heating", False),
        ("Who serviced the boiler of Greta?", "Hartwell & Sons", False),  # no passage names Greta
        ("What did the 2019 service cost?", "£1,240", False),
        ("Who serviced the boiler?", "", False),
        ("Who serviced the boiler?", "The documents do not mention it.", False),
    ],
)
def test_an_answer_is_held_if_names_numbers_and_most_words_are_there(question, answer, held):
    assert holds(question, answer, PASSAGES) is held


def events_of(text):
    """Yields the events of an answer in two pieces, as a pipeline does."""
    yield Prefill(3, 3)
    yield Piece(text[:2])
    yield Piece(text[2:])
    sources = tuple(Source("a.md", 0, len(each), each, 1.0) for each in PASSAGES)
    answer = Answer(text, sources, Plan("reuse", 0.0, ()), Timing())
    yield Answered(answer, TokenizedPrompt((), (), (0, 0)), None)


def collected(events):
    *found, whole = events
    return found, whole.answer


def test_the_text_is_held_back_until_it_is_whole():
    found, answer = collected(held_by_passages(events_of("Hartwell & Sons"), "Who serviced the boiler?"))
    assert found == [Prefill(3, 3), Piece("Ha"), Piece("rtwell & Sons")]
    assert (answer.text, answer.supported) == ("Hartwell & Sons", True)
    found, answer = collected(held_by_passages(events_of("Pendle Heating"), "Who serviced the boiler?"))
    assert found == [Prefill(3, 3), Piece(NOT_FOUND)]
    assert (answer.text, answer.supported) == (NOT_FOUND, False)
    assert len(answer.sources) == len(PASSAGES)


def test_a_checked_answer_that_is_given_up_frees_what_it_holds():
    closed = []

    def endless():
        try:
            while True:
                yield Prefill(0, 0)
        finally:
            closed.append(True)

    events = held_by_passages(endless(), "Who?")
    next(events)
    events.close()
    assert closed == [True]


def test_the_setting_checks_computed_and_cached_answers(open_kb, documents):
    known, unknown = GLORRIC, "What is the password of Zebulon?"
    plain = open_kb(answer_limit_bytes=10_000_000)
    plain.add(documents)
    assert plain.ask(known).supported is None
    invented = plain.ask(unknown).text  # the model names some password
    assert invented not in ("", NOT_FOUND)
    plain.close()
    careful = open_kb(answer_limit_bytes=10_000_000, check_answers=True)
    answer = careful.ask(known)
    assert (answer.text, answer.supported) == ("walnut", True)
    assert answer.plan.cache_hit is not None
    for cache in ("use", "refresh"):
        answer = careful.ask(unknown, cache=cache)
        assert (answer.text, answer.supported) == (NOT_FOUND, False)
