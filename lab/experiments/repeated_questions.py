"""Measures how often a stored question is found again when it is typed with other capitals, marks, spaces, or typing errors.

    .venv/bin/python lab/experiments/repeated_questions.py --output lab/results/repeated_questions.json

The questions are those of `people_test.jsonl`. A typing error drops, doubles, swaps or replaces a letter inside a word of at least
four small letters; each sits in a word of its own. Whether the result is a word is not looked at: some are, as when people type.
The matcher sees no vectors (a cosine of COSINE), so that only the words decide. A question that gets another one's answer would
count as wrong, but every variant is compared with its own question alone.
"""

import json
import random
from collections.abc import Callable
from functools import partial
from importlib import resources
from typing import Any, Final

from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave.answer_cache.matching import ENGLISH
from kvweave.config import AnswersConfig
from kvweave_lab.eval.question_matching import wilson_interval

COSINE: Final = 0.5
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_SHORTEST: Final = 4

Variant = Callable[[str], str | None]


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


def found_again(questions: list[str], variant: Variant) -> dict[str, Any]:
    """Return how many questions have such a variant, how many of these the matcher takes for the same, and the share's interval."""
    threshold = AnswersConfig().answer_threshold
    typed = [(question, text) for question in questions if (text := variant(question)) is not None]
    found = sum(ENGLISH.same(text, question, COSINE, threshold) for question, text in typed)
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
    questions = sorted({json.loads(line)["a"] for line in text.splitlines()})
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
    rows = [{"variant": name, **found_again(questions, variant)} for name, variant in variants.items()]
    write_result(
        {**environment(command_of(options)), **rounded({"cosine": COSINE, "rows": rows})}, options.output
    )


if __name__ == "__main__":
    run_script(main)
