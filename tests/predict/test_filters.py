"""Which questions are parsed from a reply, which are worth an answer, and the prompts."""

import pytest

from kvweave.predict.filters import is_answerable, is_near_duplicate, is_non_answer, parse_questions
from kvweave.predict.prompts import InstructPrompts, ReferencePrompts, prompts_for


class TestParsing:
    def test_a_question_is_found_in_a_line_with_other_marks(self):
        reply = (
            "Here are the questions:\n\n1. When is the rehearsal?\n2) **Who leads it?** (detail)\n"
            '- "Where does Anna live?"\n• What is due on 3 May?\nQ3: Why was it moved?\n'
            "6. When is the rehearsal?\nThe rehearsal is on Monday.\nHm?\n"
        )
        assert parse_questions(reply, 9) == [
            "When is the rehearsal?",
            "Who leads it?",
            "Where does Anna live?",
            "What is due on 3 May?",
            "Why was it moved?",
        ]
        assert parse_questions(reply, 2) == ["When is the rehearsal?", "Who leads it?"]

    def test_numbers_that_begin_a_question_stay(self):
        assert parse_questions("3 May or 4 May for the party?", 1) == ["3 May or 4 May for the party?"]

    @pytest.mark.parametrize("reply", ["", "No idea.", "What " * 60 + "?"])
    def test_other_text_is_no_question(self, reply):
        assert parse_questions(reply, 5) == []


class TestFilters:
    def test_questions_with_other_names_numbers_or_negation_are_no_duplicates(self):
        asked = "When does Anna arrive in Rome on 3 May?"
        assert is_near_duplicate(asked, "At what time does Anna arrive in Rome on 3 May?", 0.98)
        assert not is_near_duplicate(asked, "At what time does Anna arrive in Rome on 3 May?", 0.9)
        assert not is_near_duplicate(asked, "When does Anna arrive in Rome on 4 May?", 0.99)
        assert not is_near_duplicate(asked, "When does Anna arrive in Paris on 3 May?", 0.99)
        assert not is_near_duplicate(asked, "When does Anna not arrive in Rome on 3 May?", 0.99)
        assert not is_near_duplicate(asked, "When doesn't Anna arrive in Rome on 3 May?", 0.99)

    def test_a_question_about_other_names_and_numbers_cannot_be_answered(self):
        chunks = ["Anna's train to Rome leaves at 9:30.", "Ben stays."]
        assert is_answerable("When does Anna's train leave?", chunks)
        assert is_answerable("Who takes the 9:30 train?", chunks)
        assert not is_answerable("When does Clara's train leave?", chunks)
        assert not is_answerable("Who takes the 9:40 train?", chunks)
        assert is_answerable("What is leaving at 9:30?", chunks)
        assert is_answerable("Who is Ben?", chunks)
        assert not is_answerable("What is Ben's password?", chunks)
        assert not is_answerable("What is it for?", chunks)
        assert not is_answerable("How do I bake bread?", chunks)

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
    def test_non_answers(self, answer):
        assert is_non_answer(answer)

    @pytest.mark.parametrize(
        "answer",
        ["walnut", "At 9:30.", "No.", "It does not leave on Sundays.", "Nobody", "Ben can not come."],
    )
    def test_answers(self, answer):
        assert not is_non_answer(answer)


class TestPrompts:
    def test_the_reference_model_gets_the_prompts_it_was_trained_on(self):
        from training import abilities

        prompts = prompts_for("reference")
        assert isinstance(prompts, ReferencePrompts)
        assert prompts.summarise() == abilities.SUM_UP
        assert prompts.predict_from_documents(5) == abilities.ASK
        asked = ("What does Anna own?", "What does Ben own?")
        assert prompts.predict_from_history(asked, 5) == abilities.ASK_LIKE.format(earlier=" ".join(asked))

    def test_other_models_get_the_number_and_the_earlier_questions(self):
        prompts = prompts_for("Qwen/Qwen2.5-0.5B-Instruct")
        assert isinstance(prompts, InstructPrompts)
        assert " 4 questions" in prompts.predict_from_documents(4)
        request = prompts.predict_from_history(("What does Anna own?", "What does Ben own?"), 3)
        assert "- What does Anna own?\n- What does Ben own?\n" in request
        assert " 3 questions" in request
