"""Any text is normalized: a question that is not understood is compared word for word."""

import random

import pytest

from kvweave.answer_cache.english.normalize import normalize

WORDS = (
    "whose is isn't the boat by pier who owns what does of to in when where how many much not 's did was were a an and or than"
    " more most which why can you tell me please ? , . ! it that there have use belong to Anna 5 1999-02-03 \u0434\u043e\u043c \u5408\u540c"
).split()


@pytest.mark.parametrize(
    "question", ["Whose is the boat by the pier?", "Isn't?", "is", "", "?", "Whose", "What 's"]
)
def test_short_and_broken_questions(question):
    assert normalize(question).key


def test_generated_questions():
    chosen = random.Random(1)
    for _ in range(10_000):
        assert normalize(" ".join(chosen.choices(WORDS, k=chosen.randint(0, 9)))).key
