"""Score against computed tokens: what a recipe costs and what it gives, with the front of the best bargains."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvweave_lab.eval.report import slices
from kvweave_lab.eval.report.labels import Name, place_names
from kvweave_lab.eval.report.sheet import full_line, sheet, sign
from kvweave_lab.eval.report.style import Look, Theme
from kvweave_lab.eval.results import FULL, Row
from kvweave_lab.eval.summary import OVERALL

_ENTRY_IN = 0.23  # of the legend


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other row beats on score at the same or a lower cost, cheapest first."""
    best: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.rows.value, -row.score.value)):
        if not best or row.score.value > best[-1].score.value:
            best.append(row)
    return best


def pareto(rows: Sequence[Row], looks: Mapping[str, Look], theme: Theme) -> Figure:
    """Rows of one length and one task, usually `overall`.

    Full attention is a line, not a point: it computes the whole context, where every recipe at ratio 1 stands too.
    """
    full = rows[0].full_score
    rows = [row for row in rows if row.recipe != FULL]
    entries = _legend(rows, looks, theme)
    task = "mean over tasks" if rows[0].task == OVERALL else rows[0].task
    figure = sheet(
        9.6,
        max(4.9, _ENTRY_IN * len(entries)),
        "Score by number of context tokens computed",
        f"{task} · {slices.length_named(rows[0].context_tokens)} · bars: 95 % interval · numbers: budget",
        theme,
    )
    axes = figure.subplots()
    best = front(rows)
    _limits(axes, rows)
    axes.axhline(full.value, **full_line(theme))
    axes.plot(
        [row.rows.value for row in best], [row.score.value for row in best], **_front_line(theme), zorder=1
    )
    for name, points in slices.by_recipe(rows).items():
        _recipe(axes, points, looks[name], theme)
    axes.legend(
        *zip(*entries, strict=True),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        handlelength=2.4,
        labelspacing=0.55,
    )
    place_names(axes, _names(best, rows))
    return figure


def _names(best: Sequence[Row], rows: Sequence[Row]) -> list[Name]:
    """Recipe and budget where the front changes hands, the budget alone along a recipe.

    None at ratio 1: there every recipe is full attention, and a name would single one out.
    """
    sweeps = {name for name, points in slices.by_recipe(rows).items() if slices.swept(points)}
    names: list[Name] = []
    before = ""
    for row in best:
        budget = f"{row.budget:g}"
        texts = [] if row.series == before else [f"{row.series} {budget}" if row.budget else row.series]
        if row.series in sweeps:
            texts.append(budget)
        if row.ratio != 1:
            names.append(Name(texts, row.rows.value, row.score.value))
        before = row.series
    return names


def _limits(axes: Axes, rows: Sequence[Row]) -> None:
    most = max(row.rows.value for row in rows) or 1.0
    axes.set_xlim(-0.03 * most, 1.05 * most)
    axes.set_xlabel("context tokens computed per prompt (mean)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lowest = min(row.score.low for row in rows)
    axes.set_ylim(math.floor(max(lowest - 0.04, -0.02) * 20) / 20, 1.03)
    axes.set_ylabel("score")


def _recipe(axes: Axes, points: Sequence[Row], look: Look, theme: Theme) -> None:
    for row in points:
        axes.plot(
            [row.rows.value] * 2, [row.score.low, row.score.high], color=look.color, alpha=0.4, linewidth=1.2
        )
    axes.plot(
        [row.rows.value for row in points],
        [row.score.value for row in points],
        color=look.color,
        linestyle=look.dashes if slices.swept(points) else "none",
        linewidth=1.3,
        marker=look.marker,
        markersize=5.5,
        markerfacecolor=look.color if look.filled else theme.ground,
        zorder=3,
    )


def _front_line(theme: Theme) -> dict[str, Any]:
    return {"color": theme.ink, "alpha": 0.15, "linewidth": 9, "solid_capstyle": "round"}


def _legend(rows: Sequence[Row], looks: Mapping[str, Look], theme: Theme) -> list[tuple[Artist, str]]:
    return [
        (Line2D([], [], **full_line(theme)), "full attention"),
        *(
            (sign(looks[name], theme, line=slices.swept(own)), name)
            for name, own in slices.by_recipe(rows).items()
        ),
        (Line2D([], [], **_front_line(theme)), "Pareto front"),
    ]
