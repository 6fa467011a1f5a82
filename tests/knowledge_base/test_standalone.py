"""Which questions of a conversation may be answered without it."""

import random

import pytest

from kvweave.answering.standalone import stands_alone

EARLIER = "What is the password of Glorric? The password of Glorric is walnut. Who paid Anna for the boat? Ben paid her."

ALONE = [
    "What is the password of Sendbel?",
    "Please tell me the password of Sendbel.",
    "Could you tell me the password of Sendbel?",
    "What is Sendbel?",
    "Who founded Sendbel?",
    "Where is Port Sendbel?",
    "What is Sendbel's area?",
    "Which colours does Marburg's flag show?",
    'What is the meaning of "sandbank"?',
    "When did Marburg's parliament ratify treaty X17?",
]

LEANING = [
    "",
    "   ",
    "Why?",
    "And Sendbel?",
    "What about Sendbel?",
    "How about the one in Paris?",
    "Who else?",
    "Why not?",
    "Is it?",
    "What does it cost in Paris?",
    "Who owns it?",
    "What did he say about Sendbel?",
    "Is that all?",
    "Are you sure?",
    "What is the price?",
    "What is the price in Euro?",
    "When was the boat sold?",
    "When was the boat sold in 2019?",
    "What is the name of the boat?",
    "Which of them is in Sendbel?",
    "Which ones in Sendbel?",
    "Who in Sendbel?",
    "Which hotels in Sendbel?",
    "Is Sendbel larger?",
    "Is Sendbel better?",
    "Does Anna have more?",
    "Did Anna agree?",
    "When did Anna start?",
    "What colour did Anna choose?",
    "What happened next?",
    "What happened on Monday?",
    "Who spoke in March?",
    "Who won in 2019?",
    "In 2023?",
    "Explain.",
    "Explain that in Sendbel's words.",
    "Tell me more about Sendbel.",
    "I meant Sendbel. What is the password?",
    "Sendbel",
    "the password of sendbel",
    "What did the committee decide about Sendbel?",
    "What did you say about Sendbel?",
    "Summarise the answer.",
    "Was ist das Passwort von Sendbel?",
    "Quel est le mot de passe de Sendbel ?",
    "センドベルのパスワードは？",
]


@pytest.mark.parametrize("question", ALONE)
def test_a_question_that_names_what_it_is_about_stands_alone(question):
    assert stands_alone(question, EARLIER)


@pytest.mark.parametrize("question", LEANING)
def test_a_question_that_may_lean_on_what_was_said_does_not(question):
    assert not stands_alone(question, EARLIER)


@pytest.mark.parametrize("question", [*ALONE, *LEANING])
def test_the_first_question_leans_on_nothing(question):
    assert stands_alone(question, "")


@pytest.mark.parametrize(
    "pronoun", ["it", "he", "she", "they", "them", "his", "this", "those", "one", "there", "you"]
)
def test_no_word_that_stands_for_another_stands_alone(pronoun):
    for question in ALONE:
        head, last = question[:-1], question[-1]
        assert not stands_alone(f"{head} for {pronoun}{last}", EARLIER)


def test_a_question_about_what_was_mentioned_is_not_new():
    question = "Which colours does Marburg's flag show?"
    assert not stands_alone(question, EARLIER + " The flag of Anna is blue.")


def test_no_text_makes_it_raise():
    draw = random.Random(0)
    pieces = [
        *"what who the of is 's Anna X17 2019 ? . \" “ ” ' ’ - \n \ud800 漢字 ﷽ 🙂 e\u0301".split(" "),
        " ",
        "",
    ]
    for _ in range(3000):
        text = draw.choice(["", " "]).join(draw.choices(pieces, k=draw.randint(0, 9)))
        assert stands_alone(text, EARLIER) in (True, False)
        assert stands_alone(text, "") is True
