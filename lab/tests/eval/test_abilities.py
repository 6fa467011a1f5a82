"""The experiment that scores the questions and summaries of the reference model."""

import pytest

from kvweave_lab.eval.documents import AcrossCut, Anywhere, Draft
from kvweave_lab.eval.world import Haystack


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


def no_reply(question):
    raise AssertionError(f"the model was asked {question}")


@pytest.mark.parametrize(
    ("question", "answer", "about", "right"),
    [
        ("Which motto has Brenek?", "lantern", 1.0, 1.0),
        ("Which motto has Brenek?", "oar", 1.0, 0.0),
        ("What did Toulia get?", "the oar", 1.0, 1.0),
    ],
)
def test_a_question_is_answered_by_the_notes_about_its_name(abilities, notes, question, answer, about, right):
    found = abilities.score_question(notes, question, lambda text: {question: answer}[text])
    assert (found.about_notes, found.answered) == (about, right)


@pytest.mark.parametrize(
    ("text", "about"),
    [("What is the motto of Glorric?", 0.0), ("The motto of Brenek.", 0.0), ("Did Brenek see Toulia?", 1.0)],
)
def test_questions_that_cannot_be_correct_are_not_asked(abilities, notes, text, about):
    found = abilities.score_question(notes, text, no_reply)
    assert (found.about_notes, found.answered) == (about, 0.0)


def test_summaries_are_compared_with_the_facts_and_the_notes(abilities, notes):
    found = abilities.score_summary(notes, "She took the oar. It rained. She took the bow.")
    assert found.facts_kept == pytest.approx(1 / 3)
    assert found.true_to_notes == pytest.approx(2 / 3)
    assert abilities.score_summary(notes, "").true_to_notes == 0.0
    assert abilities.score_summary(notes, " ".join(notes.facts)) == abilities.SummaryScore(1.0, 1.0)


def test_a_next_question_should_name_something_else(abilities, notes):
    earlier = ["What is the motto of Brenek?"]
    another = abilities.score_next_question(notes, earlier, "What did Toulia take?", lambda text: "oar")
    again = abilities.score_next_question(notes, earlier, "Which motto has Brenek?", lambda text: "lantern")
    assert (another.another, another.answered) == (1.0, 1.0)
    assert (again.another, again.answered) == (0.0, 1.0)


def test_notes_contain_their_facts_and_are_deterministic(abilities):
    haystack = Haystack.of_split(abilities.SPLIT)
    first, again, other = (
        abilities.draw_notes("coref", number, lambda text: len(text.split()), haystack)
        for number in (0, 0, 1)
    )
    assert first == again
    assert first.chunks != other.chunks
    assert all(fact in " ".join(first.chunks) for fact in first.facts)
    for question in first.draft.questions:
        assert len(abilities.names_in(first, question.text)) == 1
