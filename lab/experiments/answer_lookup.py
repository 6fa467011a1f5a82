"""Measures what looking a question up in an answer cache costs, by the number of stored answers.

    .venv/bin/python lab/experiments/answer_lookup.py --output lab/results/answer_lookup.json

Stored are generated questions with their own vectors. Looked up are stored questions, stored questions with a typing error, and
questions that are not stored; each with its vector computed before, since a request that is not answered here needs that anyway.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiment import argument_parser, command_of, environment, run_script, write_result
from kvweave.answer_cache.cache import AnswerCache
from kvweave.answer_cache.records import AnswerProvenance, Vector
from kvweave.config import AnswersConfig
from kvweave.database import Database
from kvweave.embedding import TextEncoder
from kvweave.options import AskOptions
from kvweave_lab.eval.question_pairs import make_pairs
from kvweave_lab.eval.world import DEV

SETTINGS = AskOptions("reuse", 5)
BATCH = 512


def questions(count: int, seed: int) -> list[str]:
    """Return so many different questions."""
    pairs = make_pairs(DEV, count // 4, count, seed)
    found = list(dict.fromkeys(text for pair in pairs for text in (pair.cached, pair.asked)))
    random.Random(seed).shuffle(found)
    return found[:count]


def mistyped(question: str) -> str:
    """Return a question with two letters of its longest word swapped, that of the last one if all are short."""
    words = [each for each in question.split() if each.isalpha() and each.islower() and len(each) > 3]
    word = max(words or [question], key=len)
    return question.replace(word, word[:2] + word[3] + word[2] + word[4:], 1)


def milliseconds(cache: AnswerCache, asked: Sequence[str], vectors: Sequence[Vector]) -> dict[str, float]:
    """Return the median and the 95th percentile of looking questions up, and the share that was found."""
    threshold = AnswersConfig().answer_threshold
    took, found = [], 0
    for question, vector in zip(asked, vectors, strict=False):
        began = time.perf_counter()
        answer = cache.find(question, lambda vector=vector: vector, SETTINGS, threshold)  # type: ignore[misc]
        took.append(1e3 * (time.perf_counter() - began))
        found += answer is not None
    return {
        "median_ms": statistics.median(took),
        "p95_ms": statistics.quantiles(took, n=20)[-1],
        "found": found / len(asked),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--entries", type=int, action="append", help="default: 1000 and 10000")
    parser.add_argument("--lookups", type=int, default=200)
    args = parser.parse_args()
    args.entries = args.entries or [1000, 10000]
    texts = questions(max(args.entries) + args.lookups, 0)
    encoder = TextEncoder()
    vectors = np.concatenate([encoder.encode(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH)])
    rows = []
    for entries in args.entries:
        with tempfile.TemporaryDirectory() as folder:
            database = Database(Path(folder) / "answers.sqlite")
            cache = AnswerCache(database, 10**9)
            origin = AnswerProvenance(frozenset({"v"}), ("v:0",), 0)
            with cache.transaction():
                for text, vector in zip(texts[:entries], vectors, strict=False):
                    cache.put(text, vector, SETTINGS, "an answer", [], origin)
            began = time.perf_counter()
            cache.find(texts[-1], lambda: vectors[-1], SETTINGS, 0.85)
            first_ms = 1e3 * (time.perf_counter() - began)
            stored = texts[: args.lookups]
            typed = [mistyped(text) for text in stored]
            others = slice(len(texts) - args.lookups, None)
            rows.append(
                {
                    "entries": entries,
                    "first_ms": first_ms,
                    "stored": milliseconds(cache, stored, vectors),
                    "mistyped": milliseconds(cache, typed, encoder.encode(typed)),
                    "other": milliseconds(cache, texts[others], vectors[others]),
                }
            )
            database.close()
    write_result({"rows": rows} | environment(command_of(args)), args.output)


if __name__ == "__main__":
    run_script(main)
