"""The evaluation of matchers as terminal tables, JSON and a figure: hit rate against false-hit rate."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from kvweave_lab.eval.question_matching.measure import MATCHERS, MatcherRow, MatchingResult
from kvweave_lab.report import write_files
from kvweave_lab.report.figures import (
    SeriesStyle,
    Theme,
    add_series_legend,
    new_figure,
    render,
    series_styles,
)
from kvweave_lab.report.tables import flatten, text_table
from kvweave_lab.statistics import Estimate

_JSON: Final = "lookalikes.json"
_PNG: Final = "lookalikes.png"
_SHOWN: Final = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
_TARGET: Final = 0.001
"""The false-hit rate that an answer cache should stay below."""


def content(done: MatchingResult, environment: dict[str, Any]) -> dict[str, Any]:
    """Return the results as JSON values, with the environment of the measurement.

    A rate's interval is [low, high] under the rate's name with `_interval`.
    """
    return {
        "about": {
            **environment,
            "split": done.split,
            "seed": done.seed,
            "embedding": done.embedding,
            "paraphrases": done.paraphrases,
            "lookalikes": done.lookalikes,
        },
        "rows": [flatten(row) for row in done.rows],
        "kinds": [asdict(row) for row in done.kinds],
    }


def write(folder: Path, done: MatchingResult, environment: dict[str, Any]) -> list[Path]:
    """Write lookalikes.json and lookalikes.png; raise InvalidRequest if the folder cannot be written to."""
    text = json.dumps(content(done, environment), ensure_ascii=False, indent=1) + "\n"
    return write_files(folder, {_JSON: text.encode(), _PNG: matcher_curves(done)})


def threshold_table(done: MatchingResult) -> Table:
    """Return some thresholds of every matcher as a table; its default is marked."""
    caption = (
        f"{done.paraphrases:,} paraphrases, {done.lookalikes:,} look-alikes · * default threshold"
        " · brackets: 95 % interval"
    )
    table = text_table(("matcher", "threshold", "hit_rate", "false_hit_rate"), caption=caption)
    for row in done.rows:
        if row.is_default or row.threshold in _SHOWN:
            mark = "*" if row.is_default else ""
            rates = _interval_text(row.hit_rate, 1), _interval_text(row.false_hit_rate, 2)
            table.add_row(row.matcher, f"{row.threshold:.2f}{mark}", *rates)
    return table


def kind_table(done: MatchingResult) -> Table:
    """Return what each matcher accepts at its default threshold, by kind of pair."""
    matchers = list(dict.fromkeys(row.matcher for row in done.kinds))
    table = text_table(("kind", "pairs", *matchers))
    for kind in dict.fromkeys(row.kind for row in done.kinds):
        rows = [row for row in done.kinds if row.kind == kind]
        shares = [f"{row.accepted / row.pairs:.1%}" for row in rows]
        table.add_row(kind, f"{rows[0].pairs:,}", *shares)
    return table


def _interval_text(rate: Estimate, digits: int) -> str:
    return f"{rate.value:.{digits}%} ({rate.low:.{digits}%}–{rate.high:.{digits}%})"


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
        f"{done.embedding} · {done.paraphrases:,} paraphrases, {done.lookalikes:,} look-alikes, {done.split} ·"
        " large: default threshold",
        theme,
    )
    axes = figure.subplots()
    names = [matcher.name for matcher in MATCHERS]
    styles = series_styles(names, theme)
    floor = 0.5 / done.lookalikes
    for name in names:
        _draw_matcher(axes, [row for row in done.rows if row.matcher == name], styles[name], floor)
    if floor < _TARGET:
        axes.axvline(_TARGET, color=theme.soft, linestyle=":", linewidth=1)
    _set_axes(axes, floor)
    add_series_legend(figure, {name: styles[name] for name in names}, theme)
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
