"""A request with a question that cannot be followed as an English one goes the way of any other."""

from support import tiny_kb

QUESTIONS = [
    "Isn't?",
    "Whose is the boat by the pier?",
    "Whose",
    "By whom?",
    "?",
    "'s",
    "Where \ud800?",
    "\x00",
    "\u0301",
    "9" * 90 + "th",
    "\u5408\u540c\u7eed\u7b7e\u65e5\u671f\u662f\u4ec0\u4e48\u65f6\u5019\uff1f",
    "\u0645\u062a\u0649 \u064a\u0641\u062a\u062d \u0627\u0644\u0645\u062a\u062c\u0631\u061f",
    "-5 < 5 ^ 2 \u2260 \U0001f600",
]


def test_it_is_answered_cached_and_answered_again(tmp_path, tiny):
    (tmp_path / "note.txt").write_text(tiny_kb.text(0))
    with tiny_kb.open_tiny(tmp_path / "home", answer_threshold=0.0) as base:
        base.add(tmp_path / "note.txt")
        for question in QUESTIONS:
            first, again = base.ask(question), base.ask(question)
            assert first.plan.cache_hit is None, question
            assert again.text == first.text
            assert again.plan.cache_hit is not None or not first.text, question
