"""How long a question that was asked before takes, in a bank of many: in the same words, in others, and a look-alike.

    .venv/bin/python lab/experiments/repeats.py --questions 10000 --output lab/results/repeats.json

Measured is everything from the question to its answer but the writing down afterwards: reading it, its vector, the
look-up, and the comparison of candidates. The embedding model is loaded before; no language model is.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerSettings, Provenance, Vector
from kvweave.database import Database
from kvweave.embedding import TextEncoder
from kvweave.types import Source
from measured import arguments, circumstances, command_of, keep, started

HOW = AnswerSettings("reuse", None, None, 5, None, False, None, None)
TOWNS = "Delft Oslo Rome Skelt Paris Turin Ghent Basel Malmo Cork".split()
THINGS = "lantern basket kettle ladder saddle mirror barrel pillow".split()
TEXT = "The ferry leaves at noon. " * 60  # a chunk of ordinary length
THRESHOLD = 0.85

ASKED = {
    "the same words": "Who keeps {thing} {number} in {town}?",
    "other words": "By whom is {thing} {number} in {town} kept?",
    "a look-alike": "Who keeps {thing} {number} from {town}?",
}


def filled(phrasing: str, number: int) -> str:
    town, thing = TOWNS[number % len(TOWNS)], THINGS[number // len(TOWNS) % len(THINGS)]
    return phrasing.format(thing=thing, number=number, town=town)


def fill(bank: AnswerCache, encoder: TextEncoder, questions: int) -> None:
    texts = [filled(ASKED["the same words"], number) for number in range(questions)]
    sources = [Source("/notes.txt", 0, len(TEXT), TEXT, 0.5)] * HOW.top_k
    for start in range(0, questions, 512):
        some = texts[start : start + 512]
        with bank.transaction():
            for text, vector in zip(some, encoder.encode(some), strict=True):
                bank.put(text, vector, HOW, "Anna", sources, Provenance(frozenset("v"), ("v:0",), 0))


def timed(bank: AnswerCache, encoder: TextEncoder, questions: Sequence[str]) -> tuple[list[float], int]:
    """Seconds of each question, and how many found an answer."""
    times, found = [], 0
    for question in questions:

        def vector(text: str = question) -> Vector:
            return encoder.encode([text])[0]

        began = time.perf_counter()
        found += bank.find(question, vector, HOW, THRESHOLD) is not None
        times.append(time.perf_counter() - began)
    return times, found


def measure(questions: int, repeats: int) -> dict[str, object]:
    encoder = TextEncoder()
    encoder.load()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        database = Database(Path(folder) / "catalog.sqlite")
        bank = AnswerCache(database, 2**40)
        fill(bank, encoder, questions)
        numbers = [(7919 * step) % questions for step in range(repeats)]
        for name, phrasing in ASKED.items():
            times, found = timed(bank, encoder, [filled(phrasing, number) for number in numbers])
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
        size = bank.totals().bytes
        database.close()
    return {"questions": questions, "bytes": size, "repeats": repeats, "rows": rows}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    keep(measure(given.questions, given.repeats) | circumstances(command_of(given)), given.output)


if __name__ == "__main__":
    started(main)
