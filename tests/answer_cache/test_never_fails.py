"""Any text is compared, and soon."""

import os
import random
import time

import pytest

from kvweave.answer_cache.matching import ENGLISH
from kvweave.answer_cache.spelling import words_of_grammar
from kvweave.answer_cache.wordnet import general_words

SPOKEN = (
    "Whose is the boat by the pier? | Isn't? | Who owns Anna's boat? | What does the baker of the village sell on Monday? | "
    "By whom was the letter that Ben wrote read? | How much does the ferry to Delft cost? | How long has it been closed? | "
    "Can you tell me, please, when the shop opens? | Is Anna Ben's teacher? | What is the number of chairs in the hall? | "
    "Is the tower taller than the one in Delft? | At half past 5 on the 3rd of May 2026? | Did no one pay the bill? | "
    "two hundred and twenty-five million billion | What's the guests' room, or the owner's? | over 5 | 5/3/2026 | 12:30 pm"
)
SCRIPTS = (
    "\u0434\u043e\u043c \u0441\u043a\u043e\u043b\u044c\u043a\u043e \u5408\u540c \u8ab0\u306e\u8239 \ubb34\u0641\u0627 "
    "\u0645\u0646 \u05d1\u05d9\u05ea \u0663\u0664th \uff15\uff10 \u00b2 \u2167 \ufdfa \u1e9e \u0130 \u00df"
)
MARKS = "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u0301\u0327 \u200b \u202e \ufe0f \ud800 \U000e0041"
SIGNS = "? . , ! ' 's n't s' -5 5- @ a@b.de @@ #5 #5th @day:1 @: # & + ++ / _ - -- ( ) [ \" \u2019 \u2026 % $ \u20ac * ^ \\ < = ~"
CONTROL = "\x00 \x01 \x07 \x1b[0m \x7f \x85 \u2028 \ufeff \r \n \t"
WORDS = [
    *(word for word in SPOKEN.split() if word != "|"),
    *SCRIPTS.split(" "),
    *MARKS.split(" "),
    *SIGNS.split(" "),
    *CONTROL.split(" "),
]
COUNT = int(os.environ.get("KVWEAVE_TEST_STRINGS", "3000"))
"""How many strings are generated; 100,000 and more for a whole search (`make questions`)."""

COMPARED = 5
"""One of so many strings is also compared with another one, which takes longer than reading it."""

SEED = int(os.environ.get("KVWEAVE_TEST_SEED", "1"))


@pytest.fixture(autouse=True)
def nothing_is_caught(caplog):
    """Nothing is logged."""
    yield
    assert caplog.records == []


@pytest.mark.parametrize(
    "question",
    [
        "Whose is the boat by the pier?",
        "Isn't?",
        "is",
        "",
        "?",
        "Whose",
        "What 's",
        " \t\n",
        "\x00",
        "\ud800",
        "9" * 5000 + "th",
        "9" * 5000,
        "two " + "million " * 39,
    ],  # int() and str() refuse more than 4300 digits
)
def test_short_and_broken_questions(question):
    assert ENGLISH.key(question)
    assert ENGLISH.compare(question, "Who owns the boat?", 1.0, 0.5).sameness == "different"
    assert ENGLISH.compare(question, question, 1.0, 0.5).sameness == "same"


def _generated(chosen: random.Random, known: list[str]) -> str:
    """Return words of several kinds mixed, cut anywhere, joined by spaces or not."""
    kind = chosen.random()
    if kind < 0.5:  # natural words in any order
        text = " ".join(chosen.choices(known, k=chosen.randint(0, 12)))
    elif kind < 0.8:
        text = chosen.choice([" ", " ", "", "  "]).join(chosen.choices(WORDS, k=chosen.randint(0, 9)))
    else:  # any characters
        text = "".join(
            chr(chosen.choice([chosen.randrange(128), chosen.randrange(0x3000), chosen.randrange(0x110000)]))
            for _ in range(chosen.randint(0, 20))
        )
    start = chosen.randint(0, max(0, len(text) // 4)) if chosen.random() < 0.3 else 0
    return text[start : chosen.randint(start, len(text))] if chosen.random() < 0.3 else text[start:]


def test_generated_questions():
    known = [
        *sorted(words_of_grammar()),
        *sorted(general_words().often),
        *([word for word in SPOKEN.split() if word != "|"] * 5),
    ]
    chosen = random.Random(SEED)
    before = "Who owns the boat?"
    for number in range(COUNT):
        question = _generated(chosen, known)
        if not number % COMPARED:
            compared = ENGLISH.compare(question, before, 0.9, 0.85)
            assert compared.sameness == ENGLISH.compare(before, question, 0.9, 0.85).sameness, (
                question,
                before,
            )
            before = chosen.choice(
                [question, question.replace("e", "ee", 1), f"Sorry, a question. {question}?"]
            )
        assert len(ENGLISH.key(question)) == 32, question
        assert ENGLISH.same(question, question, 1.0, 0.5) != ENGLISH.is_time_sensitive(question)


LONG = [
    "Who owns the boat? ",
    "a",
    "?",
    ". ",
    " ,",
    "@",
    "a@",
    "9",
    "1,111",
    "9:",
    "million ",
    "and ",
    "'",
    "'s ",
    "\u0301\u0327",
    "\ufdfa",
    "please ",
    "of ",
    "\x00",
    "(-",
    "5 - ",
    "A-",
    "twenty-",
    "do you know ",
    "who is it that ",
]


@pytest.mark.parametrize("part", LONG)
def test_the_time_for_a_very_long_text_grows_with_its_length(part):
    """A step that takes quadratic time over 30,000 characters takes many seconds; a tenth of a second is usual."""
    text = (part * 30_000)[:30_000]
    for question in (text + " x", f"Who owns the boat {text}?"):
        began = time.process_time()
        assert ENGLISH.key(question)
        assert time.process_time() - began < 0.9


@pytest.mark.parametrize("part", LONG)
def test_a_text_of_the_greatest_length_of_a_question_takes_little_time(part):
    text = (part * 1000)[:990]
    began = time.process_time()
    for question in (text, text + " x", "x " + text):
        assert ENGLISH.key(question)
    assert time.process_time() - began < 3


def test_a_long_text_about_today_is_not_cached():
    text = "The report. " * 10_000
    assert not ENGLISH.is_time_sensitive(text)
    assert ENGLISH.is_time_sensitive(text + "What happened today?")
    assert not ENGLISH.same(text, text + "x", 1.0, 0.5)
