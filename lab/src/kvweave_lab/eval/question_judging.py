"""Hit rates of guard and judge: what a model answers from the cache of the pairs that the guard lets pass, by bound on errors."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from numpy.typing import NDArray
from rich.table import Table

from kvweave.answer_cache.cache import JUDGED_COSINE
from kvweave.answer_cache.matching import ENGLISH
from kvweave.config import AnswersConfig
from kvweave.embedding import TextEncoder
from kvweave.state.judge import Judge
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.question_matching import text_cosines
from kvweave_lab.eval.question_pairs import Pair
from kvweave_lab.report import flatten, interval_text, text_table
from kvweave_lab.statistics import Estimate, wilson_interval

BOUNDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Values of answer_error_bound, the default among them."""


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """One pair: its kind and label, whether it is served without the judge, and the judge's score if the judge is asked."""

    kind: str
    same: bool
    sure: bool
    score: float | None


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """What is served under a bound on errors, which makes a threshold; None serves nothing on the judge's word.

    `hit_rate` and `false_hit_rate` count what is served without the judge too, `wrong` is the share of look-alikes among `judged_hits`,
    the pairs that are served on its word. Rates 0..1 with Wilson's 95 % intervals.
    """

    bound: float
    is_default: bool
    threshold: float | None
    hit_rate: Estimate
    false_hit_rate: Estimate
    judged_hits: int
    wrong: Estimate | None


@dataclass(frozen=True, slots=True)
class JudgingResult:
    """Results of one model. `auc` is that of the pairs that come with kvweave, `pair_s` the median time of a judged pair."""

    model: str
    auc: float
    fit_s: float
    first_s: float
    pair_s: float
    pairs: tuple[JudgedPair, ...]
    rows: tuple[JudgedRow, ...]


def judge_pairs(
    judge: Judge, encoder: TextEncoder, pairs: Sequence[Pair], progress: Progress = no_progress
) -> JudgingResult:
    """Fit the judge, if it is not, and put to it every pair that kvweave would: similar ones that pass the guard."""
    fit = judge.fit(progress)
    cosines = text_cosines([(pair.cached, pair.asked) for pair in pairs], encoder, progress)
    found, taken_s = _scored(judge if fit.pairs else None, pairs, cosines, progress)
    rows = tuple(_row(found, bound, fit.threshold(bound)) for bound in BOUNDS)
    first_s, *later_s = taken_s or [0.0]
    return JudgingResult(fit.model, fit.auc, fit.seconds, first_s, median(later_s or [0.0]), found, rows)


def _scored(
    judge: Judge | None, pairs: Sequence[Pair], cosines: NDArray[Any], progress: Progress
) -> tuple[tuple[JudgedPair, ...], list[float]]:
    """Return the pairs with their scores, and the seconds that each judged one took."""
    found, taken_s = [], []
    for number, (pair, cosine) in enumerate(zip(pairs, cosines, strict=True)):
        progress("judging", number, len(pairs))
        sameness = ENGLISH.compare(pair.asked, pair.cached, float(cosine), JUDGED_COSINE).sameness
        score = None
        if sameness == "near" and judge is not None:
            began = time.perf_counter()
            score = judge.score(pair.cached, pair.asked)
            taken_s.append(time.perf_counter() - began)
        found.append(JudgedPair(pair.kind, pair.is_paraphrase, sameness == "same", score))
    progress("judging", len(pairs), len(pairs))
    return tuple(found), taken_s


def served(pair: JudgedPair, threshold: float | None) -> bool:
    """Return whether a pair is served."""
    judged = threshold is not None and pair.score is not None and pair.score >= threshold
    return pair.sure or judged


def _row(pairs: Sequence[JudgedPair], bound: float, threshold: float | None) -> JudgedRow:
    hits, false_hits = (
        [served(pair, threshold) for pair in pairs if pair.same is same] for same in (True, False)
    )
    judged = [pair.same for pair in pairs if not pair.sure and served(pair, threshold)]
    return JudgedRow(
        bound,
        bound == AnswersConfig().answer_error_bound,
        threshold,
        wilson_interval(sum(hits), len(hits)),
        wilson_interval(sum(false_hits), len(false_hits)),
        len(judged),
        wilson_interval(judged.count(False), len(judged)) if judged else None,
    )


def judging_content(done: JudgingResult) -> dict[str, Any]:
    """Return a result as JSON values."""
    plain = {name: getattr(done, name) for name in ("model", "auc", "fit_s", "first_s", "pair_s")}
    return {
        **plain,
        "rows": [flatten(row) for row in done.rows],
        "pairs": [asdict(pair) for pair in done.pairs if pair.sure or pair.score is not None],
        "kinds": kinds(done),
    }


def kinds(done: JudgingResult) -> list[dict[str, Any]]:
    """Return for each kind of pairs how many there are, are served without the judge, are judged, and are served under each bound."""
    found = []
    for kind in dict.fromkeys(pair.kind for pair in done.pairs):
        own = [pair for pair in done.pairs if pair.kind == kind]
        by_bound = {f"{row.bound:g}": sum(served(pair, row.threshold) for pair in own) for row in done.rows}
        found.append(
            {
                "kind": kind,
                "pairs": len(own),
                "sure": sum(pair.sure for pair in own),
                "judged": sum(pair.score is not None for pair in own),
                "served": by_bound,
            }
        )
    return found


def judging_table(done: JudgingResult) -> Table:
    """Return what is served under each bound as a table; the default is marked."""
    caption = f"guard and judge, {done.model}: AUC {done.auc:.2f}, {done.pair_s * 1e3:.0f} ms a judged pair · * default"
    table = text_table(
        ("bound", "threshold", "hit_rate", "false_hit_rate", "judged", "wrong"), caption=caption
    )
    for row in done.rows:
        table.add_row(
            f"{row.bound:.1%}{'*' if row.is_default else ''}",
            "none" if row.threshold is None else f"{row.threshold:.2f}",
            interval_text(row.hit_rate, ".1%"),
            interval_text(row.false_hit_rate, ".2%"),
            str(row.judged_hits),
            "" if row.wrong is None else interval_text(row.wrong, ".1%"),
        )
    return table
