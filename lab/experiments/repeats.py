"""Measures look-ups in a large answer cache: of the same question, a paraphrase and a look-alike.

    .venv/bin/python lab/experiments/repeats.py --questions 10000 --output lab/results/repeats.json

The time includes normalizing the question, embedding it, the look-up and comparing candidates, but not storing the answer.
The embedding model is loaded before; no language model is needed.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiment import argument_parser, command_of, environment, run_script, write_result
from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance, Vector
from kvweave.database import Database
from kvweave.embedding import TextEncoder
from kvweave.options import AskOptions
from kvweave.results import Source

SETTINGS = AskOptions("reuse", 5)
TOWNS = "Delft Oslo Rome Skelt Paris Turin Ghent Basel Malmo Cork".split()
THINGS = "lantern basket kettle ladder saddle mirror barrel pillow".split()
TEXT = "The ferry leaves at noon. " * 60  # a chunk of typical length
THRESHOLD = 0.85

PHRASINGS = {
    "the same words": "Who keeps {thing} {number} in {town}?",
    "other words": "By whom is {thing} {number} in {town} kept?",
    "a look-alike": "Who keeps {thing} {number} from {town}?",
}


def question_of(phrasing: str, number: int) -> str:
    town, thing = TOWNS[number % len(TOWNS)], THINGS[number // len(TOWNS) % len(THINGS)]
    return phrasing.format(thing=thing, number=number, town=town)


def fill(answer_cache: AnswerCache, encoder: TextEncoder, questions: int) -> None:
    texts = [question_of(PHRASINGS["the same words"], number) for number in range(questions)]
    sources = [Source("/notes.txt", 0, len(TEXT), TEXT, 0.5)] * SETTINGS.top_k
    for start in range(0, questions, 512):
        batch = texts[start : start + 512]
        with answer_cache.transaction():
            for text, vector in zip(batch, encoder.encode(batch), strict=True):
                answer_cache.put(
                    text, vector, SETTINGS, "Anna", sources, AnswerProvenance(frozenset("v"), ("v:0",), 0)
                )


def time_look_ups(
    answer_cache: AnswerCache, encoder: TextEncoder, questions: Sequence[str]
) -> tuple[list[float], int]:
    """Return the seconds of each question, and the number of found answers."""
    times, found = [], 0
    for question in questions:

        def vector(text: str = question) -> Vector:
            return encoder.encode([text])[0]

        start = time.perf_counter()
        found += answer_cache.find(question, vector, SETTINGS, THRESHOLD) is not None
        times.append(time.perf_counter() - start)
    return times, found


def measure(questions: int, repeats: int) -> dict[str, object]:
    encoder = TextEncoder()
    encoder.load()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "catalog.sqlite")
        answer_cache = AnswerCache(database, 2**40)
        fill(answer_cache, encoder, questions)
        numbers = [(7919 * step) % questions for step in range(repeats)]
        for name, phrasing in PHRASINGS.items():
            times, found = time_look_ups(
                answer_cache, encoder, [question_of(phrasing, number) for number in numbers]
            )
            ordered = sorted(times)
            rows.append(
                {
                    "asked": name,
                    "found": found,
                    "of": repeats,
                    "median_s": statistics.median(times),
                    "p95_s": ordered[int(0.95 * (repeats - 1))],
                }
            )
        size = answer_cache.totals().bytes
        database.close()
    return {"questions": questions, "bytes": size, "repeats": repeats, "rows": rows}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    write_result(measure(args.questions, args.repeats) | environment(command_of(args)), args.output)


if __name__ == "__main__":
    run_script(main)
