"""Hit rates of every matcher at every threshold, on paraphrases and on look-alikes, and the report of them.

A matcher decides by a score and a threshold whether two questions share an answer: kvweave's, plain cosine, cosine behind
kvweave's guard, and the rules of GPTCache, MeanCache and vCache. All of them get the same vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray
from rich.table import Table

from kvweave.answer_cache.matching import ENGLISH
from kvweave.config import AnswersConfig
from kvweave.embedding import TextEncoder
from kvweave.errors import InvalidRequest
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.learned_matchers import VCACHE_BOUND, meancache_threshold, vcache_scores
from kvweave_lab.eval.question_pairs import Pair
from kvweave_lab.report import flatten, interval_text, json_bytes, text_table, write_files
from kvweave_lab.report.figures import (
    SeriesStyle,
    Theme,
    add_series_legend,
    new_figure,
    render,
    styles_of,
)
from kvweave_lab.statistics import Estimate, wilson_interval

THRESHOLDS: Final = tuple(round(0.5 + 0.01 * step, 2) for step in range(50))
REJECTED: Final = -1.0
"""The score of a pair that every threshold rejects."""
OURS: Final = "kvweave"
GUARDED: Final = "cosine, guarded"
"""Cosine, of pairs in which kvweave's guard finds no difference. kvweave calls these pairs near and serves none of them."""
_BATCH: Final = 512

Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Matcher:
    """A rule: the questions of a pair share an answer if its score reaches the threshold.

    Attributes:
        name: in tables and figures.
        threshold: the default; None for the one that fits the pairs best.
        score: from pairs and their cosines (pairs,) to scores (pairs,), higher for more similar pairs.
    """

    name: str
    threshold: float | None
    score: Callable[[Sequence[Pair], Scores], Scores]


@dataclass(frozen=True, slots=True)
class MatcherRow:
    """One matcher at one threshold; `is_default` marks its own default. Rates 0..1 with Wilson's 95 % intervals."""

    matcher: str
    threshold: float
    is_default: bool
    hit_rate: Estimate
    false_hit_rate: Estimate


@dataclass(frozen=True, slots=True)
class KindRow:
    """How many pairs of one kind a matcher accepts at a threshold; `is_default` marks its own default."""

    matcher: str
    threshold: float
    is_default: bool
    kind: str
    pairs: int
    accepted: int


@dataclass(frozen=True, slots=True)
class MatchingResult:
    """Results of an evaluation: its settings, rows by threshold, and rows by kind and threshold.

    `pool` is where the pairs come from: a split, or a file.
    """

    pool: str
    seed: int
    embedding: str
    paraphrases: int
    lookalikes: int
    rows: tuple[MatcherRow, ...]
    kinds: tuple[KindRow, ...]

    def default(self, matcher: str) -> MatcherRow:
        """Return a matcher's row at its default threshold."""
        return next(row for row in self.rows if row.matcher == matcher and row.is_default)


def evaluate_matchers(
    encoder: TextEncoder,
    pairs: Sequence[Pair],
    pool: str,
    seed: int = 0,
    progress: Progress = no_progress,
) -> MatchingResult:
    """Measure every matcher on pairs, which come from `pool` and `seed`.

    Each pair is a cache with one question and a new question. Raises InvalidRequest for zero pairs of either sort,
    ModelNotFound for an embedding model that cannot be found.
    """
    paraphrases = sum(pair.is_paraphrase for pair in pairs)
    lookalikes = len(pairs) - paraphrases
    if paraphrases < 1 or lookalikes < 1:
        raise InvalidRequest(
            f"{paraphrases} paraphrases and {lookalikes} look-alikes: at least one of each is needed"
        )
    cosines = text_cosines([(pair.cached, pair.asked) for pair in pairs], encoder, progress)
    rows: list[MatcherRow] = []
    kinds: list[KindRow] = []
    for matcher in MATCHERS:
        scores, default = matcher.score(pairs, cosines), matcher.threshold
        if default is None:
            default = meancache_threshold([pair.is_paraphrase for pair in pairs], scores, THRESHOLDS)
        rows += _rows(matcher.name, default, pairs, scores)
        for threshold in sorted({*_SHOWN, default}):
            kinds += _kinds(matcher.name, threshold, threshold == default, pairs, scores >= threshold)
    return MatchingResult(pool, seed, encoder.name, paraphrases, lookalikes, tuple(rows), tuple(kinds))


def text_cosines(
    pairs: Sequence[tuple[str, str]], encoder: TextEncoder, progress: Progress = no_progress
) -> Scores:
    """Return (pairs,) the cosine of both texts of each pair; every text is embedded once."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors = []
    for start in range(0, len(texts), _BATCH):
        progress("embedding questions", start, len(texts))
        vectors.append(encoder.encode(texts[start : start + _BATCH]))
    progress("embedding questions", len(texts), len(texts))
    stacked = np.concatenate(vectors)  # (texts, dimensions)
    places = {text: place for place, text in enumerate(texts)}
    ones, others = (stacked[[places[pair[side]] for pair in pairs]] for side in (0, 1))
    cosines: Scores = np.einsum("pd,pd->p", ones, others).astype(np.float64)
    return cosines


def _rows(matcher: str, default: float, pairs: Sequence[Pair], scores: Scores) -> list[MatcherRow]:
    same = np.array([pair.is_paraphrase for pair in pairs])
    rows = []
    for threshold in sorted({*THRESHOLDS, default}):
        hits = scores >= threshold
        rows.append(
            MatcherRow(
                matcher,
                threshold,
                threshold == default,
                wilson_interval(int(hits[same].sum()), int(same.sum())),
                wilson_interval(int(hits[~same].sum()), int((~same).sum())),
            )
        )
    return rows


def _kinds(
    matcher: str, threshold: float, default: bool, pairs: Sequence[Pair], hits: NDArray[np.bool_]
) -> list[KindRow]:
    """Return a row for each kind of pair."""
    named = np.array([pair.kind for pair in pairs])
    return [
        KindRow(
            matcher,
            threshold,
            default,
            str(kind),
            int((named == kind).sum()),
            int(hits[named == kind].sum()),
        )
        for kind in dict.fromkeys(pair.kind for pair in pairs)
    ]


def _kvweave(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    """Return 1 for pairs with the same words, the cosine of the same keywords, REJECTED for others."""

    def score(pair: Pair, cosine: float) -> float:
        if ENGLISH.same(pair.asked, pair.cached, 0.0, 1.0):
            return 1.0
        return cosine if ENGLISH.same(pair.asked, pair.cached, 1.0, 1.0) else REJECTED

    return np.array([score(pair, float(cosine)) for pair, cosine in zip(pairs, cosines, strict=True)])


def _guarded(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    """Return the cosine of pairs in which the guard finds no difference, REJECTED for others."""
    passed = [ENGLISH.compare(pair.asked, pair.cached, 1.0, 0.0).sameness != "different" for pair in pairs]
    return np.where(passed, cosines, REJECTED)


def _cosine(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    return cosines


def _gptcache(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    """Apply SearchDistanceEvaluation to FAISS's squared L2 distance of unit vectors, 0..4: (4 - d²) / 4."""
    return 1 - (2 - 2 * cosines) / 4


def _vcache(pairs: Sequence[Pair], cosines: Scores) -> Scores:
    return vcache_scores([pair.is_paraphrase for pair in pairs], cosines)


MATCHERS: Final = (
    Matcher(OURS, AnswersConfig().answer_threshold, _kvweave),
    Matcher("cosine", AnswersConfig().answer_threshold, _cosine),
    Matcher(GUARDED, AnswersConfig().answer_threshold, _guarded),
    Matcher("gptcache", 0.8, _gptcache),
    Matcher("meancache", None, _cosine),
    Matcher("vcache", 1 - VCACHE_BOUND, _vcache),
)
"""The first is kvweave's. GPTCache embeds with another model by default (paraphrase-albert). Here its rule and its
threshold of 0.8 are applied to the vectors that all matchers get. vCache's threshold is 1 − δ."""


_JSON: Final = "lookalikes.json"
_PNG: Final = "lookalikes.png"
_SHOWN: Final = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
_TARGET: Final = 0.001
"""The false-hit rate that an answer cache should stay below."""


def content(
    done: MatchingResult, environment: dict[str, Any], judging: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the results as JSON values, with the environment of the measurement, and with the results of a judge if there are any.

    A rate's interval is [low, high] under the rate's name with `_interval`.
    """
    return {
        "about": {
            **environment,
            "split": done.pool,
            "seed": done.seed,
            "embedding": done.embedding,
            "paraphrases": done.paraphrases,
            "lookalikes": done.lookalikes,
        },
        "rows": [flatten(row) for row in done.rows],
        "kinds": [asdict(row) for row in done.kinds],
        **({} if judging is None else {"judging": judging}),
    }


def write(
    folder: Path, done: MatchingResult, environment: dict[str, Any], judging: dict[str, Any] | None = None
) -> list[Path]:
    """Write lookalikes.json and lookalikes.png; raise InvalidRequest if the folder cannot be written to."""
    found = json_bytes(content(done, environment, judging))
    return write_files(folder, {_JSON: found, _PNG: matcher_curves(done)})


def threshold_table(
    done: MatchingResult, judged: Sequence[tuple[str, float, Estimate, Estimate]] = ()
) -> Table:
    """Return some thresholds of every matcher as a table; its default is marked.

    `judged` are further rows: the name of a judge, its bound on wrong answers, its hit rate and its false-hit rate.
    """
    caption = (
        f"{done.paraphrases:,} paraphrases, {done.lookalikes:,} look-alikes · * default threshold"
        " · brackets: 95 % interval"
    )
    table = text_table(("matcher", "threshold", "hit_rate", "false_hit_rate"), caption=caption)
    for row in done.rows:
        if row.is_default or row.threshold in _SHOWN:
            mark = "*" if row.is_default else ""
            rates = interval_text(row.hit_rate, ".1%"), interval_text(row.false_hit_rate, ".2%")
            table.add_row(row.matcher, f"{row.threshold:.2f}{mark}", *rates)
    for name, bound, hit_rate, false_hit_rate in judged:
        shown = interval_text(hit_rate, ".1%"), interval_text(false_hit_rate, ".2%")
        table.add_row(f"{OURS}, judged by {name}", f"bound {bound:.1%}*", *shown)
    return table


def kind_table(done: MatchingResult) -> Table:
    """Return a table of the shares that each matcher accepts at its default threshold, by kind of pair."""
    default = [row for row in done.kinds if row.is_default]
    matchers = list(dict.fromkeys(row.matcher for row in default))
    table = text_table(("kind", "pairs", *matchers))
    for kind in dict.fromkeys(row.kind for row in default):
        rows = [row for row in default if row.kind == kind]
        shares = [f"{row.accepted / row.pairs:.1%}" for row in rows]
        table.add_row(kind, f"{rows[0].pairs:,}", *shares)
    return table


def matcher_curves(done: MatchingResult) -> bytes:
    """Draw a curve per matcher as PNG.

    A rate of 0 is drawn at half a look-alike, since a logarithmic axis has no 0.
    """
    return render(lambda theme: _figure(done, theme))


def _figure(done: MatchingResult, theme: Theme) -> Figure:
    figure = new_figure(
        7.2,
        4.4,
        "Paraphrases that hit, by look-alikes that hit",
        f"{done.embedding} · {done.paraphrases:,} paraphrases, {done.lookalikes:,} look-alikes, {done.pool} ·"
        " large: default threshold",
        theme,
    )
    axes = figure.subplots()
    names = [matcher.name for matcher in MATCHERS]
    styles = styles_of(names, theme)
    floor = 0.5 / done.lookalikes
    for name in names:
        _draw_matcher(axes, [row for row in done.rows if row.matcher == name], styles[name], floor)
    if floor < _TARGET:
        axes.axvline(_TARGET, color=theme.soft, linestyle=":", linewidth=1)
    _set_axes(axes, floor)
    add_series_legend(figure, styles, theme)
    return figure


def _draw_matcher(axes: Axes, rows: list[MatcherRow], style: SeriesStyle, floor: float) -> None:
    at = [(max(row.false_hit_rate.value, floor), row.hit_rate.value) for row in rows]
    axes.plot(*zip(*at, strict=True), color=style.color, linestyle=style.dashes, linewidth=1.5)
    (default,) = [place for place, row in zip(at, rows, strict=True) if row.is_default]
    axes.plot(*default, color=style.color, marker=style.marker, markersize=9, linestyle="none", zorder=3)


def _set_axes(axes: Axes, floor: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(floor * 0.8, 1.1)
    axes.set_ylim(-0.02, 1.03)
    axes.set_xlabel("look-alikes that get the wrong answer")
    axes.set_ylabel("paraphrases that get the answer")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    shares = {10.0**power: f"{10.0 ** (power + 2):g} %" for power in range(-4, 1)}
    ticks = {floor: "0"} | {share: name for share, name in shares.items() if share > 2 * floor}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
