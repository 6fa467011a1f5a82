"""The first question of a conversation is answered from the answer cache; later ones never are."""

import pytest

from kvweave.types import Message
from support import tiny_kb

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")
GLORRIC = "What is the password of Glorric?"
SENDBEL = "What is the password of Sendbel?"
AGAIN = "The password of Glorric?"
ORDER = "What did the guest order?"
FOLLOW_UPS = ["And what is it?", "What is the password?"]


@pytest.fixture
def base(open_kb, documents):
    """A knowledge base with three documents and an answer cache; conversations attend to everything."""
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", max_new_tokens=12)
    kb.add(documents)
    return kb


def say(base, talk, question):
    return "".join(base.send(talk, question))


def stored(base):
    questions = [question for question, _ in base.answers.most_used()]
    return sorted(questions + [one.question for one in base.answers.pending()])


def test_the_first_question_shares_its_answer_with_ask(base):
    with base.conversation("one") as talk:
        said = say(base, talk, GLORRIC)
    answer = base.ask(GLORRIC)
    assert answer.plan.cache_hit.question == GLORRIC
    fresh = base.ask(GLORRIC, cache="off")
    assert said.strip() == answer.text == fresh.text
    assert answer.sources == fresh.sources
    with base.conversation("two") as talk:
        assert say(base, talk, AGAIN) == answer.text
        assert "password of Glorric" in talk.text
    assert base.answers.totals().given == 2
    assert [(one.question, one.reason) for one in base.answers.pending()] == [(AGAIN, "matched")]


def test_the_same_follow_up_in_two_conversations_never_shares_an_answer(tiny, tmp_path):
    (tmp_path / "note.txt").write_text(tiny_kb.text(0))
    with tiny_kb.open_tiny(tmp_path / "home", answer_limit_bytes=10**7) as base:
        base.add(tmp_path / "note.txt")
        for name, opening in (("one", GLORRIC), ("two", ORDER)):
            with base.conversation(name) as talk:
                for question in (opening, *FOLLOW_UPS):
                    say(base, talk, question)
        assert stored(base) == sorted([GLORRIC, ORDER])
        assert base.predictions.history.recent(9) == [GLORRIC, ORDER]
        for follow_up in FOLLOW_UPS:  # even an answer that was asked for alone is not theirs
            assert base.ask(follow_up).plan.cache_hit is None
        before = base.answers.totals()
        for opening in (GLORRIC, ORDER):
            earlier = [Message("user", opening), Message("assistant", "walnut")]
            for follow_up in FOLLOW_UPS:
                stream = base.stream(follow_up, earlier=earlier)
                assert "".join(stream).strip() == stream.answer.text.strip()
                assert stream.answer.plan.cache_hit is None
        assert base.answers.totals() == before
        assert before.given == 0


def test_what_was_said_before_and_an_instruction_turn_the_cache_off(base):
    earlier = [Message("user", ORDER), Message("assistant", "tea")]
    base.ask(GLORRIC)
    before = stored(base)
    for more in ({"earlier": earlier}, {"instruction": "Answer in capitals."}):
        stream = base.stream(GLORRIC, **more)
        assert "".join(stream)
        assert stream.answer.plan.cache_hit is None
    "".join(base.stream(SENDBEL, earlier=earlier))
    assert stored(base) == before


def test_later_turns_of_a_conversation_do_not_use_the_cache(base):
    base.ask(GLORRIC)
    with base.conversation() as talk:
        say(base, talk, ORDER)
        say(base, talk, GLORRIC)
        say(base, talk, SENDBEL)
    assert stored(base) == sorted([GLORRIC, ORDER])
    assert base.answers.totals().given == 0
