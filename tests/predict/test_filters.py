"""Which questions are parsed from a reply, which are worth an answer, and the prompts."""

import pytest

from kvweave.answer_cache.evidence import (
    is_answerable,
    is_invented,
    is_near_duplicate,
    is_non_answer,
    is_other_language,
    is_supported,
    is_unclear,
    names_answer,
    parse_questions,
    repeats,
    unknown_words,
)
from kvweave.background import prompts as prompts_module
from kvweave.background.prediction import request_prompt
from kvweave.background.prompts import FewShotPrompts, InstructPrompts, ReferencePrompts, prompts_for
from kvweave.background.source_passages import PASSAGE_WORDS, Asked, answers_in, nearest_first, passages
from kvweave.models.prompt import PromptTemplate
from kvweave.testing import tiny_tokenizer
from kvweave.types import Message


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

    def test_a_line_may_have_several_questions(self):
        reply = "When is the rehearsal? Who leads it on Monday? Why? It is on Monday. Where is the hall?"
        assert parse_questions(reply, 9) == [
            "When is the rehearsal?",
            "Who leads it on Monday?",
            "It is on Monday. Where is the hall?",
        ]

    def test_numbers_that_begin_a_question_stay(self):
        assert parse_questions("3 May or 4 May for the party?", 1) == ["3 May or 4 May for the party?"]

    @pytest.mark.parametrize("reply", ["", "No idea.", "What " * 60 + "?"])
    def test_other_text_is_no_question(self, reply):
        assert parse_questions(reply, 5) == []


class TestFilters:
    def test_a_question_that_names_its_answer_asks_for_something_else(self):
        assert names_answer("Who is Dr Pyne?", "Dr Pyne")
        assert names_answer("Which Ashenby woman did this?", "Ashenby")
        assert not names_answer("Which firm did Dr Pyne hire?", "Dr Orrick")
        assert not names_answer("Who hired the firm?", "")

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


class TestScreening:
    @pytest.mark.parametrize(
        "text",
        [
            "lamp " * 100,
            "What is the the password?",
            "The lamp, the lamp, the lamp.",
            "Marta runs it. Ben rows. Marta runs it. Marta runs it.",
            "Which hall is the hall of the hall?",
        ],
    )
    def test_what_goes_round_in_circles_repeats(self, text):
        assert repeats(text)

    @pytest.mark.parametrize(
        "text",
        [
            "What does a ticket for the crossing cost?",
            "Anna owns a boat. Ben owns a kiln. Carl owns a hat.",
            "Is it 9:30 or 10:30?",
            "",
        ],
    )
    def test_other_text_does_not(self, text):
        assert not repeats(text)

    def test_words_that_are_in_no_chunk_are_found_and_too_many_make_a_summary_invented(self):
        chunks = ["Anna owns the boats at the pier.", "Ben rents one."]
        assert unknown_words("Who is renting a boat to the simppting?", chunks) == {"simppting"}
        assert not is_invented("Anna owns boats at the pier. Ben rents one from her.", chunks)
        assert is_invented("Anna loves Paris in spring, and owns a boat.", chunks)

    def test_a_question_must_name_what_it_is_about(self):
        assert is_unclear("When did he send the word?")
        assert is_unclear("What is this about?")
        assert not is_unclear("When did Anna send her word?")
        assert not is_unclear("How many jars are in the freezer?")

    def test_another_language_is_noticed_but_not_missed_where_there_is_none(self):
        chunks = ["The ferry to Skelt leaves at nine, and it is never late."]
        assert is_other_language("Wann fährt die Fähre nach Skelt?", chunks)
        assert not is_other_language("When does the ferry leave?", chunks)
        assert not is_other_language("Skelt 9:30?", chunks)
        assert not is_other_language(
            "Wann fährt die Fähre?", ["Die Fähre fährt um neun, sie ist nicht zu spät."]
        )

    @pytest.mark.parametrize(
        ("answer", "supported"),
        [
            ("It leaves at 9:30 from the north pier.", True),
            ("9:30", True),
            ("9:40", False),
            ("from the south gate", False),
            ("Marta leaves.", False),
            ("The ferry to Skelt leaves.", False),  # says nothing beyond the question
            ("Yes.", False),
        ],
    )
    def test_an_answer_must_be_in_the_chunks(self, answer, supported):
        chunks = ["The ferry leaves from the north pier at 9:30.", "Skelt is an island."]
        assert is_supported("When does the ferry to Skelt leave?", answer, chunks) == supported


class TestPrompts:
    def test_the_reference_model_gets_the_prompts_it_was_trained_on(self):
        from training import abilities

        prompts = prompts_for("reference", chat=False)
        assert isinstance(prompts, ReferencePrompts)
        assert prompts.summarise().text == abilities.SUM_UP
        assert prompts.predict_from_documents(5).text == abilities.ASK
        asked = ("What does Anna own?", "What does Ben own?")
        assert prompts.predict_from_history(asked, 5).text == abilities.ASK_LIKE.format(
            earlier=" ".join(asked)
        )

    def test_chat_models_get_the_number_and_the_earlier_questions(self):
        prompts = prompts_for("Qwen/Qwen2.5-0.5B-Instruct", chat=True)
        assert isinstance(prompts, InstructPrompts)
        assert prompts.summarise() is None  # it asks about passages as they are
        first, second = (prompts.predict_from_documents(5, draw) for draw in (0, 1))
        assert "Write 5 questions" in first.text
        shown = [each.example[1].splitlines() for each in (first, second)]
        assert [*shown[0], *shown[1]] == list(prompts_module.KINDS.values())
        for kind, question in prompts_module.KINDS.items():
            assert question.startswith(kind)
            assert kind in (first if question in shown[0] else second).text
            assert parse_questions(question, 1) == [question]
            assert is_answerable(question, [first.example[0]])
        request = prompts.predict_from_history(("What does Anna own?", "What does Ben own?"), 3).text
        assert "- What does Anna own?\n- What does Ben own?\n" in request
        assert " 3 questions" in request

    def test_chat_models_read_notes_and_request_in_one_message(self):
        template = PromptTemplate(
            tiny_tokenizer("{% for each in messages %}{{ each.content }}\n{% endfor %}")
        )
        request = InstructPrompts().predict_from_documents(2)
        prompt = request_prompt(template, ["A note.", "Another."], request, "Answer.")
        said = f"A note.\n\nAnother.\n\n{request.text}"
        example = Message("user", request.example[0]), Message("assistant", request.example[1])
        expected, _ = template.render_chat(
            [Message("system", request.system), *example, Message("user", said)]
        )
        assert prompt.token_ids == expected
        assert [(span.kind, span.tokens) for span in prompt.spans] == [
            ("system", 0),
            ("question", prompt.tokens),
        ]

    def test_base_models_get_worked_examples_in_the_layout_of_their_prompts(self, template):
        prompts = prompts_for("google/gemma-3-270m", chat=template.is_chat)
        assert isinstance(prompts, FewShotPrompts)
        request = prompts.ask_for("nine crowns", "How much")
        text = f"{request.system}A note.{request.text}"
        assert request.plain
        assert text.count("\nQuestion: ") == 1 + len(prompts_module.ASKED_EXAMPLES)
        assert text.endswith("\n\nNotes: A note.\nAnswer: nine crowns\nQuestion: How much")
        assert request.lead == "How much"
        assert text.count("Question: ") == 1 + len(prompts_module.ASKED_EXAMPLES)

    def test_the_worked_examples_pass_the_screening(self):
        for notes, answer, question in prompts_module.ASKED_EXAMPLES:
            assert parse_questions(question, 1) == [question]
            assert is_answerable(question, [notes])
            assert answer.split()[-1] in notes
            assert question.startswith(Asked(notes, answer).opening)


class TestPassages:
    TEXT = (
        "The roof was looked at by Brimble Roofing on 3 May. They want £7,950 for it. It has lasted nineteen years, and 27 per cent"
        " of the tiles are cracked. "
    )

    def test_they_end_with_a_sentence(self):
        found = list(passages(self.TEXT * 6))
        assert len(found) > 2
        assert all(each.endswith(".") and len(each.split()) < 2 * PASSAGE_WORDS for each in found)
        assert " ".join(found).split() == (self.TEXT * 6).split()

    def test_names_with_apostrophes_are_whole(self):
        text = "They asked Mr O'Neill, and Anna O\u2019Brien took Anna's key to Lower Fenwick."
        assert [each.answer for each in answers_in(text)] == [
            "Mr O'Neill",
            "Anna O\u2019Brien",
            "Anna",
            "Lower Fenwick",
        ]

    def test_names_numbers_and_dates_are_what_can_be_asked_for(self):
        asked = answers_in(self.TEXT)
        assert [each.answer for each in asked] == [
            "Brimble Roofing",
            "3 May",
            "£7,950",
            "nineteen years",
            "27 per cent",
        ]
        assert [each.opening for each in asked] == [
            "Which",
            "When",
            "How much",
            "How long",
            "What percentage",
        ]
        assert {each.passage for each in asked} == {self.TEXT.strip()}
        assert answers_in("No name. Nor a number.") == []

    def test_parts_of_dates_and_words_that_only_begin_a_sentence_are_not_asked_for(self):
        text = "27/5 and then the swarm. She counted six they said, 29, not 30 of them; As if Mrs Ada Marl had seen it at The Bell."
        assert [each.answer for each in answers_in(text)] == ["29", "30", "Mrs Ada Marl", "Bell"]

    def test_those_near_to_questions_come_first(self):
        asked = answers_in(
            self.TEXT + "Padding goes on and on. " * 8 + "The cook is called Irma Bell, they say."
        )
        assert nearest_first(asked, ["Who is the cook?"])[0].answer == "Irma Bell"
