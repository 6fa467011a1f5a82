"""The benchmark that tells what becomes of the questions and key content that the reference model writes."""

import pytest

from kvweave_lab.eval.draft import AcrossCut, Anywhere, Draft
from kvweave_lab.eval.haystack import Haystack


@pytest.fixture
def abilities(script):
    return script("abilities")


@pytest.fixture
def notes(abilities):
    draft = Draft(
        [Anywhere("The motto of Brenek is lantern."), AcrossCut("Then came Toulia.", "She took the oar.")]
    )
    draft.ask("multikey", "What is the motto of Brenek?", "lantern")
    draft.ask("multikey", "What did Toulia take?", "oar")
    chunks = (
        "It rained. The motto of Brenek is lantern. Then came Toulia.",
        "She took the oar. It was late.",
    )
    return abilities.Notes("multikey", chunks, frozenset({"Brenek", "Toulia", "lantern", "oar"}), draft)


def silent(question):
    raise AssertionError(f"nobody was to be asked {question}")


@pytest.mark.parametrize(
    ("question", "answer", "about", "right"),
    [
        ("Which motto has Brenek?", "lantern", 1.0, 1.0),
        ("Which motto has Brenek?", "oar", 1.0, 0.0),
        ("What did Toulia get?", "the oar", 1.0, 1.0),
    ],
)
def test_a_question_is_answered_with_what_the_notes_say_of_its_name(
    abilities, notes, question, answer, about, right
):
    found = abilities.asked(notes, question, lambda asked: {question: answer}[asked])
    assert (found.about_notes, found.answered) == (about, right)


@pytest.mark.parametrize(
    ("text", "about"),
    [("What is the motto of Glorric?", 0.0), ("The motto of Brenek.", 0.0), ("Did Brenek see Toulia?", 1.0)],
)
def test_what_cannot_be_right_is_not_asked(abilities, notes, text, about):
    found = abilities.asked(notes, text, silent)
    assert (found.about_notes, found.answered) == (about, 0.0)


def test_key_content_is_held_against_the_facts_and_the_notes(abilities, notes):
    found = abilities.summed_up(notes, "She took the oar. It rained. She took the bow.")
    assert found.facts_kept == pytest.approx(1 / 3)
    assert found.true_to_notes == pytest.approx(2 / 3)
    assert abilities.summed_up(notes, "").true_to_notes == 0.0
    assert abilities.summed_up(notes, " ".join(notes.facts)) == abilities.SummedUp(1.0, 1.0)


def test_a_next_question_is_about_something_else(abilities, notes):
    earlier = ["What is the motto of Brenek?"]
    another = abilities.next_asked(notes, earlier, "What did Toulia take?", lambda asked: "oar")
    again = abilities.next_asked(notes, earlier, "Which motto has Brenek?", lambda asked: "lantern")
    assert (another.another, another.answered) == (1.0, 1.0)
    assert (again.another, again.answered) == (0.0, 1.0)


def test_notes_say_their_facts_and_are_the_same_every_time(abilities):
    haystack = Haystack.of_split(abilities.SPLIT)
    first, again, other = (
        abilities.drawn("coref", number, lambda text: len(text.split()), haystack) for number in (0, 0, 1)
    )
    assert first == again
    assert first.chunks != other.chunks
    assert all(fact in " ".join(first.chunks) for fact in first.facts)
    for question in first.draft.questions:
        assert len(abilities.named(first, question.text)) == 1
