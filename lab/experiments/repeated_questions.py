"""Measures how often a stored question is found again when it is typed with other capitals, marks, spaces, or typing errors.

    .venv/bin/python lab/experiments/repeated_questions.py --output lab/results/repeated_questions.json

The questions are those of `people_test.jsonl`. A typing error drops, doubles, swaps or replaces a letter inside a word of at least
four small letters; each sits in a word of its own. Whether the result is a word is not looked at: some are, as when people type.
The matcher sees no vectors (a cosine of COSINE), so that only the words decide. A question that gets another one's answer would
count as wrong, but every variant is compared with its own question alone.

Also tells why questions with typing errors are missed, and which look-alikes would be taken if any typing error were one: those
whose words are the other question's but for one letter each, in up to three words.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any, Final

from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave.answer_cache.matching import ENGLISH
from kvweave.answer_cache.spelling import edits, is_general, is_usual, is_word
from kvweave.config import AnswersConfig
from kvweave.text import NUMBERS_AND_DATES, clean_text, split_words
from kvweave_lab.statistics import wilson_interval

COSINE: Final = 0.5
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_SHORTEST: Final = 4
_MOST_ERRORS: Final = 3

Variant = Callable[[str], str | None]

Typed = list[tuple[str, str]]
"""Questions, each as it is typed again."""


def mistyped(question: str, errors: int, draw: random.Random) -> str | None:
    """Return a question with so many typing errors, each in another word; None if it has too few words for them."""
    words = question.split(" ")
    bare = [word.rstrip("?.,!") for word in words]
    places = [
        place
        for place, word in enumerate(bare)
        if len(word) >= _SHORTEST and word.isalpha() and (word.islower() or place == 0)
    ]
    if len(places) < errors:
        return None
    for place in draw.sample(places, errors):
        words[place] = _with_error(bare[place], draw) + words[place][len(bare[place]) :]
    return " ".join(words)


def _with_error(word: str, draw: random.Random) -> str:
    """Return a word with one wrong letter, none of its outer ones; always another word."""
    while True:
        at = draw.randrange(1, len(word) - 1)
        wrong = draw.choice(
            [
                word[:at] + word[at + 1] + word[at] + word[at + 2 :],
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[:at] + draw.choice(_LETTERS) + word[at + 1 :],
            ]
        )
        if wrong != word:
            return wrong


def reason(question: str, typed: str) -> tuple[str, str]:
    """Return why a question with typing errors is not found again, and the first error that is no error by itself."""
    if ENGLISH.is_time_sensitive(question) or ENGLISH.is_time_sensitive(typed):
        return "about the moment, so never stored", ""
    words = question.split(" ")
    for place, (wrong, right) in enumerate(zip(typed.split(" "), words, strict=True)):
        one_error = " ".join([*words[:place], wrong, *words[place + 1 :]])
        if wrong != right and not same(question, one_error):
            typed_word, word = wrong.rstrip("?.,!").lower(), right.rstrip("?.,!").lower()
            return _reason_of_word(typed_word, word), f"{word} → {typed_word}"
    return "recognised error by error only", ""


def _reason_of_word(typed: str, word: str) -> str:
    if word in NUMBERS_AND_DATES or typed in NUMBERS_AND_DATES:
        return "a number or part of a date"
    if is_general(typed):
        return f"typed is another {'frequent' if is_usual(typed) else 'rare'} word"
    if is_word(typed):
        return "typed is a name"
    return "as near to another word, or nearer" if is_general(word) else "an error of a word in no list"


def same(question: str, typed: str) -> bool:
    """Return whether the words alone tell that a question is typed again."""
    return ENGLISH.same(typed, question, COSINE, AnswersConfig().answer_threshold)


def missed(typed: Typed, errors: int) -> list[dict[str, Any]]:
    """Return how many questions with so many typing errors are missed for each reason, the most first, with an example."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for question, text in typed:
        if same(question, text):
            continue
        why, example = reason(question, text)
        counts[why] += 1
        examples.setdefault(why, example)
    return [
        {"errors": errors, "reason": why, "questions": count, "example": examples[why]}
        for why, count in counts.most_common()
    ]


def one_letter_apart(one: str, other: str) -> str:
    """Return whether two questions differ by one letter each in one to three words: "name", "number" or "word"; else nothing."""
    words = [split_words(clean_text(text)) for text in (one, other)]
    if len(words[0]) != len(words[1]):
        return ""
    unlike = [(here, there) for here, there in zip(*words, strict=True) if here.text != there.text]
    if not 0 < len(unlike) <= _MOST_ERRORS or any(
        edits(here.text, there.text, 1) > 1 or min(len(here.text), len(there.text)) < _SHORTEST
        for here, there in unlike
    ):
        return ""
    here, there = unlike[0]
    if any(sign.isdigit() for sign in here.text + there.text):
        return "number"
    return "name" if here.named and there.named else "word"


def typed_again(questions: list[str], variant: Variant) -> Typed:
    """Return the questions that have such a variant, each with it."""
    return [(question, text) for question in questions if (text := variant(question)) is not None]


def found_again(typed: Typed) -> dict[str, Any]:
    """Return how many questions have a variant, how many of these the matcher takes for the same, and the share's interval."""
    found = sum(same(question, text) for question, text in typed)
    share = wilson_interval(found, len(typed))
    return {
        "questions": len(typed),
        "found": found,
        "share": share.value,
        "share_interval": [share.low, share.high],
    }


def main() -> None:
    """Measure each variant, and write the result."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    text = (resources.files("kvweave_lab.eval") / "data" / "questions" / "people_test.jsonl").read_text(
        "utf-8"
    )
    pairs = [json.loads(line) for line in text.splitlines()]
    questions = sorted({pair["a"] for pair in pairs})
    draw = random.Random(options.seed)
    variants: dict[str, Variant] = {
        "all capitals": str.upper,
        "all small letters": str.lower,
        "no mark at the end": lambda question: question.rstrip("?.! "),
        "more spaces and marks": lambda question: f"  {question.rstrip('?')} !!",
        "one typing error": partial(mistyped, errors=1, draw=draw),
        "two typing errors": partial(mistyped, errors=2, draw=draw),
        "three typing errors": partial(mistyped, errors=3, draw=draw),
    }
    typed = {name: typed_again(questions, variant) for name, variant in variants.items()}
    rows = [{"variant": name, **found_again(each)} for name, each in typed.items()]
    lookalikes = [pair for pair in pairs if not pair["same"]]
    apart = Counter(filter(None, (one_letter_apart(pair["a"], pair["b"]) for pair in lookalikes)))
    measured = {
        "cosine": COSINE,
        "rows": rows,
        "missed": [*missed(typed["one typing error"], 1), *missed(typed["two typing errors"], 2)],
        "lookalikes": len(lookalikes),
        "one_letter_apart": dict(apart),
    }
    write_result({**environment(command_of(options)), **rounded(measured)}, options.output)


if __name__ == "__main__":
    run_script(main)
