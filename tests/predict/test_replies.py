"""What is taken from a model's reply, and what of it is worth an answer."""

import pytest

from kvweave.predict.filters import is_about, nearly_same, questions_in, says_nothing
from kvweave.predict.prompts import InstructPrompts, ReferencePrompts, wording_for


class TestReplies:
    def test_a_line_is_a_question_whatever_stands_around_it(self):
        reply = (
            "Here are the questions:\n\n1. When is the rehearsal?\n2) **Who leads it?** (detail)\n"
            '- "Where does Anna live?"\n• What is due on 3 May?\nQ3: Why was it moved?\n'
            "6. When is the rehearsal?\nThe rehearsal is on Monday.\nHm?\n"
        )
        assert questions_in(reply, 9) == [
            "When is the rehearsal?",
            "Who leads it?",
            "Where does Anna live?",
            "What is due on 3 May?",
            "Why was it moved?",
        ]
        assert questions_in(reply, 2) == ["When is the rehearsal?", "Who leads it?"]

    def test_numbers_that_begin_a_question_stay(self):
        assert questions_in("3 May or 4 May for the party?", 1) == ["3 May or 4 May for the party?"]

    @pytest.mark.parametrize("reply", ["", "No idea.", "What " * 60 + "?"])
    def test_what_is_no_question_is_none(self, reply):
        assert questions_in(reply, 5) == []


class TestScreening:
    def test_questions_that_differ_in_what_counts_are_not_nearly_the_same(self):
        asked = "When does Anna arrive in Rome on 3 May?"
        assert nearly_same(asked, "At what time does Anna arrive in Rome on 3 May?", 0.98)
        assert not nearly_same(asked, "At what time does Anna arrive in Rome on 3 May?", 0.9)
        assert not nearly_same(asked, "When does Anna arrive in Rome on 4 May?", 0.99)
        assert not nearly_same(asked, "When does Anna arrive in Paris on 3 May?", 0.99)
        assert not nearly_same(asked, "When does Anna not arrive in Rome on 3 May?", 0.99)
        assert not nearly_same(asked, "When doesn't Anna arrive in Rome on 3 May?", 0.99)

    def test_a_question_about_other_names_and_numbers_cannot_be_answered(self):
        chunks = ["Anna's train to Rome leaves at 9:30.", "Ben stays."]
        assert is_about("When does Anna's train leave?", chunks)
        assert is_about("Who takes the 9:30 train?", chunks)
        assert not is_about("When does Clara's train leave?", chunks)
        assert not is_about("Who takes the 9:40 train?", chunks)
        assert is_about("What is leaving at 9:30?", chunks)
        assert is_about("Who is Ben?", chunks)
        assert not is_about("What is Ben's password?", chunks)
        assert not is_about("What is it for?", chunks)
        assert not is_about("How do I bake bread?", chunks)

    @pytest.mark.parametrize(
        "answer",
        [
            "",
            "  ",
            "The notes do not mention it.",
            "That isn't stated in the notes.",
            "There is no information about this.",
            "I don't know.",
            "I cannot find that.",
            "It cannot be determined from the notes.",
            "Unknown",
        ],
    )
    def test_answers_that_say_nothing(self, answer):
        assert says_nothing(answer)

    @pytest.mark.parametrize(
        "answer",
        ["walnut", "At 9:30.", "No.", "It does not leave on Sundays.", "Nobody", "Ben can not come."],
    )
    def test_answers_that_do(self, answer):
        assert not says_nothing(answer)


class TestWording:
    def test_the_reference_model_is_asked_in_the_words_it_was_trained_on(self):
        from training import abilities

        wording = wording_for("reference")
        assert isinstance(wording, ReferencePrompts)
        assert wording.sum_up() == abilities.SUM_UP
        assert wording.from_knowledge(5) == abilities.ASK
        asked = ("What does Anna own?", "What does Ben own?")
        assert wording.from_history(asked, 5) == abilities.ASK_LIKE.format(earlier=" ".join(asked))

    def test_other_models_are_told_how_many_and_what_was_asked(self):
        wording = wording_for("Qwen/Qwen2.5-0.5B-Instruct")
        assert isinstance(wording, InstructPrompts)
        assert " 4 questions" in wording.from_knowledge(4)
        told = wording.from_history(("What does Anna own?", "What does Ben own?"), 3)
        assert "- What does Anna own?\n- What does Ben own?\n" in told
        assert " 3 questions" in told
