"""Shows whether `answer_error_bound` is kept: questions come one after the other, and what is learned decides what is given next.

    .venv/bin/python lab/experiments/error_bound.py --output lab/results/error_bound.json

Each pair of a file is a stored question and one that is asked. What is certain is given at once. What is near is given if the verdicts
so far allow it (`near_misses.least_score`, for each kind), and is judged: at once where it was computed, with the next idle work where it
was given. A verdict is whether both questions ask the same. Pairs have no documents, so the check of the evidence lets all pass. What is
read alike needs that check alone; it counts as given after a check, and not under the bound.

Two sorts of streams: all pairs of a pool once in random order, and many more that are drawn from it with replacement, each as a new
question to a new stored one. A bound is *broken* in a stream if anything was ever given where more than its share is wrong in the whole
pool: of that kind, at that cosine or above.

At the *edge*, just the bound's share of verdicts refutes, whatever the cosine. Then nothing should be given in more than about 5 % of
streams. Beside the rule stands the usual one-sided binomial test, made anew after every tenth verdict from one cosine on after the other.
"""

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from scipy.stats import binom

from experiment import argument_parser, command_of, environment, run_script, write_result
from kvweave.answer_cache.matching import ENGLISH, READING
from kvweave.answer_cache.near_misses import Verdict, least_score
from kvweave.config import AnswersConfig
from kvweave.embedding import TextEncoder
from kvweave_lab.eval.question_matching import text_cosines
from kvweave_lab.eval.question_pairs import read_pairs

QUESTIONS: Final = Path(__file__).parents[1] / "src" / "kvweave_lab" / "eval" / "data" / "questions"
POOLS: Final = {
    "dev": (QUESTIONS / "people_dev.jsonl", QUESTIONS / "people_dev_more.jsonl"),
    "test": (QUESTIONS / "people_test.jsonl",),
}
BOUNDS: Final = (0.01, 0.05, 0.1)
DOUBT: Final = 0.05
ONCE, DRAWN = "once", "drawn"


class Asked(NamedTuple):
    """A pair: the stored question, what the matcher says, and whether both ask the same."""

    stored: str
    sameness: str
    kind: str
    cosine: float
    same: bool


class Given(NamedTuple):
    """What one stream gave: numbers of right and wrong answers, at once and after a check; and whether the bound was broken."""

    questions: int
    paraphrases: int
    at_once: tuple[int, int]
    read_alike: tuple[int, int]
    near: tuple[int, int]
    broken: bool


def compared(files: Sequence[Path], encoder: TextEncoder) -> list[Asked]:
    """Return the matcher's judgement of each pair."""
    pairs = [pair for file in files for pair in read_pairs(file)]
    cosines = text_cosines([(pair.cached, pair.asked) for pair in pairs], encoder)
    threshold = AnswersConfig().answer_threshold
    found = []
    for pair, cosine in zip(pairs, cosines.tolist(), strict=True):
        said = ENGLISH.compare(pair.asked, pair.cached, cosine, threshold)
        found.append(Asked(pair.cached, said.sameness, said.kind, cosine, pair.is_paraphrase))
    return found


def true_error(pool: Sequence[Asked], kind: str, least: float) -> float:
    """Return which share of a pool's near pairs of a kind, from a cosine on, do not ask the same."""
    near = [
        each.same for each in pool if each.sameness == "near" and each.kind == kind and each.cosine >= least
    ]
    return 1 - sum(near) / len(near)


def stream(asked: Sequence[Asked], pool: Sequence[Asked], bound: float, idle_every: int) -> Given:
    """Let questions come in order; answers that were given are judged after every `idle_every` questions."""
    verdicts: dict[str, list[Verdict]] = defaultdict(list)
    least: dict[str, float | None] = {}
    refuted: dict[str, float] = {}
    waiting: list[Asked] = []
    counts = {name: [0, 0] for name in ("at once", "read alike", "near")}
    broken = False

    def judge(each: Asked) -> None:
        verdicts[each.kind].append(Verdict(each.cosine, each.same))
        least[each.kind] = least_score(verdicts[each.kind], bound)
        if not each.same:
            refuted[each.stored] = max(each.cosine, refuted.get(each.stored, -1.0))

    for number, each in enumerate(asked, 1):
        if each.sameness == "same" or (each.sameness == "near" and each.kind == READING):
            counts["at once" if each.sameness == "same" else "read alike"][not each.same] += 1
        elif each.sameness == "near":
            from_on = least.get(each.kind)
            if from_on is not None and each.cosine >= max(from_on, refuted.get(each.stored, -1.0) + 1e-9):
                counts["near"][not each.same] += 1
                broken = broken or true_error(pool, each.kind, from_on) > bound
                waiting.append(each)
            else:
                judge(each)
        if number % idle_every == 0:
            for one in waiting:
                judge(one)
            waiting.clear()
    pairs = ((right, wrong) for right, wrong in counts.values())
    return Given(len(asked), sum(each.same for each in asked), *pairs, broken)


def summary(streams: Sequence[Given]) -> dict[str, object]:
    """Return shares over all streams, with the middle 95 % of streams where they differ."""
    paraphrases = sum(each.paraphrases for each in streams)

    def hits(name: str) -> float:
        return sum(getattr(each, name)[0] for each in streams) / paraphrases

    def wrong(name: str) -> float | None:
        right, bad = (sum(getattr(each, name)[at] for each in streams) for at in (0, 1))
        return bad / (right + bad) if right + bad else None

    giving = [each.near[1] / sum(each.near) for each in streams if sum(each.near)]
    return {
        "streams": len(streams),
        "questions": streams[0].questions,
        "at_once": hits("at_once"),
        "at_once_wrong": wrong("at_once"),
        "read_alike": hits("read_alike"),
        "read_alike_wrong": wrong("read_alike"),
        "near": hits("near"),
        "near_wrong": wrong("near"),
        "near_wrong_interval": [float(np.percentile(giving, at)) for at in (2.5, 97.5)] if giving else None,
        "giving": len(giving) / len(streams),
        "broken": sum(each.broken for each in streams) / len(streams),
    }


def tested_anew(verdicts: Sequence[Verdict], bound: float) -> bool:
    """Return whether the usual test passes at the highest of many cosines from which on enough verdicts are known."""
    enough = math.ceil(math.log(DOUBT) / math.log1p(-bound))
    for least in np.arange(0.98, 0.38, -0.02):
        above = [verdict.agreed for verdict in verdicts if verdict.score >= least]
        if len(above) >= enough:
            return bool(binom.cdf(len(above) - sum(above), len(above), bound) <= DOUBT)
    return False


def at_the_edge(streams: int, verdicts: int) -> list[dict[str, object]]:
    """Return for each bound the share of streams in which each rule ever gives an answer."""
    rows = []
    for bound in BOUNDS[1:]:
        gave = {"kvweave": 0, "tested anew": 0}
        for number in range(streams):
            rng = np.random.default_rng(number)
            drawn = zip(rng.uniform(0.5, 0.95, verdicts), rng.random(verdicts) >= bound, strict=True)
            made = [Verdict(float(score), bool(agreed)) for score, agreed in drawn]
            parts = [made[:known] for known in range(10, verdicts + 1, 10)]
            gave["kvweave"] += any(least_score(part, bound) is not None for part in parts)
            gave["tested anew"] += any(tested_anew(part, bound) for part in parts)
        shares: dict[str, object] = {name: number / streams for name, number in gave.items()}
        rows.append({"bound": bound, "streams": streams, "verdicts": verdicts} | shares)
    return rows


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--questions", type=int, default=10_000, help="of a stream that is drawn")
    parser.add_argument("--idle-every", type=int, default=50, help="questions between idle work")
    args = parser.parse_args()
    encoder = TextEncoder()
    rows = []
    for name, files in POOLS.items():
        pool = compared(files, encoder)
        near = [each for each in pool if each.sameness == "near" and each.kind != READING]
        for sort in (ONCE, DRAWN):
            for bound in BOUNDS:
                streams = []
                for number in range(args.streams):
                    rng = random.Random(number)
                    asked = rng.sample(pool, len(pool))
                    if sort == DRAWN:
                        drawn = rng.choices(pool, k=args.questions)
                        asked = [each._replace(stored=str(at)) for at, each in enumerate(drawn)]
                    streams.append(stream(asked, pool, bound, args.idle_every))
                error = 1 - sum(each.same for each in near) / len(near)
                row = {"pool": name, "pairs": len(pool), "near_pairs": len(near), "near_error": error}
                rows.append(row | {"sort": sort, "bound": bound} | summary(streams))
                print(rows[-1], flush=True)
    edge = at_the_edge(args.streams, 400)
    write_result({"rows": rows, "edge": edge} | environment(command_of(args)), args.output)


if __name__ == "__main__":
    run_script(main)
