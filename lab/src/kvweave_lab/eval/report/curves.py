"""Score against ratio and score against computed tokens: a series for each recipe."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from kvweave_lab.eval.outcomes import FULL
from kvweave_lab.eval.rows import (
    OVERALL,
    Row,
    is_swept,
    length_text,
    panel_names,
    rows_by_series,
    rows_of_task,
)
from kvweave_lab.report.figures import (
    SeriesStyle,
    Theme,
    add_legend,
    legend_handle,
    new_figure,
    plot_estimates,
    ratio_axis,
    reference_line,
    score_axis,
)

Styles = Mapping[str, SeriesStyle]

_APART = 0.024  # between points at the same ratio
_FEW_LINES = 6  # in a panel; more are drawn thinner, and once in a large panel
_LARGE_IN = 3.8


def score_by_ratio(rows: Sequence[Row], styles: Styles, theme: Theme) -> Figure:
    """Draw a panel per task, for rows of one length; rows by coverage have no ratio and are left out.

    A dashed line is full attention; bands and bars are 95 % intervals.
    """
    rows = [row for row in rows if row.coverage is None]
    names = panel_names(rows)
    crowded = len(names) > 1 and _line_count(rows) > _FEW_LINES
    small = names[1:] if crowded else names
    columns = _columns(len(small))
    lines = math.ceil(len(small) / columns)
    width_in, height_in = _size_in(columns, lines)
    figure = new_figure(
        width_in,
        height_in + (_LARGE_IN if crowded else 0),
        "Score by share of stale tokens recomputed",
        f"{length_text(rows[0].context_tokens)} · bands and bars: 95 % interval",
        theme,
    )
    lowest = min(row.score.low for row in rows)
    above = [_LARGE_IN] if crowded else []
    grid = figure.add_gridspec(len(above) + lines, columns, height_ratios=above + [height_in / lines] * lines)
    if crowded:  # the first panel, usually the mean over tasks, has the whole width
        axes = figure.add_subplot(grid[0, :])
        _ratio_panel(axes, names[0], rows, styles, theme, lowest, left=True, bottom=True)
    for place, name in enumerate(small):
        line, column = divmod(place, columns)
        axes = figure.add_subplot(grid[len(above) + line, column])
        bottom = place + columns >= len(small)
        _ratio_panel(axes, name, rows, styles, theme, lowest, left=column == 0, bottom=bottom)
    entries: list[tuple[Artist, str]] = [(Line2D([], [], **reference_line(theme)), "full attention")]
    for name, points in rows_by_series(rows).items():
        if name != FULL:
            entries.append((legend_handle(styles[name], theme, line=_any_swept(points)), name))
    add_legend(figure, entries)
    return figure


def _line_count(rows: Sequence[Row]) -> int:
    """Return how many recipes are lines in at least one panel."""
    return sum(name != FULL and _any_swept(points) for name, points in rows_by_series(rows).items())


def _any_swept(points: Sequence[Row]) -> bool:
    return any(is_swept(rows_of_task(points, task)) for task in {row.task for row in points})


def _columns(panels: int) -> int:
    if panels <= 3:
        return panels
    return 2 if panels == 4 else 3 if panels in (5, 6, 9) else 4


def _size_in(columns: int, lines: int) -> tuple[float, float]:
    """Return the width and height in inches: one panel is large, many are small."""
    panel = {1: (7.2, 4.0), 2: (4.4, 3.1), 3: (3.5, 2.5)}.get(columns, (2.75, 2.2))
    return panel[0] * columns, panel[1] * lines + 0.6


def _ratio_panel(
    axes: Axes,
    task: str,
    rows: Sequence[Row],
    styles: Styles,
    theme: Theme,
    lowest: float,
    *,
    left: bool,
    bottom: bool,
) -> None:
    """Draw one task; only panels at the left and at the bottom have labelled axes."""
    own = rows_of_task(rows, task)
    full = own[0].full_score
    axes.axhspan(full.low, full.high, color=theme.ramp[-1], alpha=0.08, linewidth=0)
    axes.axhline(full.value, **reference_line(theme))
    series = {name: points for name, points in rows_by_series(own).items() if name != FULL}
    shifts = _shifts(series)
    few = sum(map(is_swept, series.values())) <= _FEW_LINES
    for name, points in series.items():
        if is_swept(points):
            _ratio_line(axes, points, styles[name], theme, few=few)
        else:
            _ratio_points(axes, points, styles[name], theme, shifts)
    axes.set_title(task)
    score_axis(axes, lowest, labelled=left)
    ratio_axis(axes, labelled=bottom)


def _ratio_line(axes: Axes, points: Sequence[Row], style: SeriesStyle, theme: Theme, *, few: bool) -> None:
    plot_estimates(
        axes,
        [row.budget for row in points],
        [row.score for row in points],
        style,
        theme,
        band_alpha=0.15 if few else 0.07,
        linewidth=1.6 if few else 1.1,
        markersize=3.4 if few else 2.8,
        markerfacecolor=style.color if style.filled else "none",
        zorder=3,
    )


def _ratio_points(
    axes: Axes,
    points: Sequence[Row],
    style: SeriesStyle,
    theme: Theme,
    shifts: Mapping[tuple[str, float], float],
) -> None:
    for row in points:
        x = row.budget + shifts[row.recipe, row.budget]
        axes.plot([x, x], [row.score.low, row.score.high], color=style.color, linewidth=1.3, zorder=4)
        axes.plot(
            [x],
            [row.score.value],
            color=style.color,
            marker=style.marker,
            markersize=5,
            markerfacecolor=style.color if style.filled else theme.ground,
            zorder=5,
        )


def _shifts(series: Mapping[str, Sequence[Row]]) -> dict[tuple[str, float], float]:
    """Return how far to move single points at the same ratio, so that no interval hides another."""
    crowds: dict[float, list[str]] = {}
    for name, points in series.items():
        if not is_swept(points):
            for row in points:
                crowds.setdefault(row.budget, []).append(name)
    shifts = {}
    for ratio, crowd in crowds.items():
        for place, name in enumerate(crowd):
            shifts[name, ratio] = (place - (len(crowd) - 1) / 2) * _APART
    return shifts


_LEGEND_ENTRY_IN = 0.23


def score_by_cost(rows: Sequence[Row], styles: Styles, theme: Theme) -> Figure:
    """Draw score against computed tokens with the Pareto front, for rows of one length and task, usually `overall`.

    Full attention is a line, not a point: it computes the whole context, as every recipe at ratio 1 does.
    """
    full = rows[0].full_score
    rows = [row for row in rows if row.recipe != FULL]
    series = rows_by_series(rows)
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], **reference_line(theme)), "full attention"),
        *((legend_handle(styles[name], theme, line=is_swept(own)), name) for name, own in series.items()),
        (Line2D([], [], **_front_line(theme)), "Pareto front"),
    ]
    task = "mean over tasks" if rows[0].task == OVERALL else rows[0].task
    figure = new_figure(
        9.6,
        max(4.9, _LEGEND_ENTRY_IN * len(entries)),
        "Score by number of context tokens computed",
        f"{task} · {length_text(rows[0].context_tokens)} · bars: 95 % interval · numbers: budget",
        theme,
    )
    axes = figure.subplots()
    front = pareto_front(rows)
    _cost_axes(axes, rows)
    axes.axhline(full.value, **reference_line(theme))
    costs, scores = [row.rows.value for row in front], [row.score.value for row in front]
    axes.plot(costs, scores, **_front_line(theme), zorder=1)
    for name, points in series.items():
        _cost_series(axes, points, styles[name], theme)
    axes.legend(
        *zip(*entries, strict=True),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        handlelength=2.4,
        labelspacing=0.55,
    )
    _place_labels(axes, _front_labels(front, rows))
    return figure


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other row beats on score at the same or a lower cost, cheapest first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.rows.value, -row.score.value)):
        if not front or row.score.value > front[-1].score.value:
            front.append(row)
    return front


def _cost_axes(axes: Axes, rows: Sequence[Row]) -> None:
    most = max(row.rows.value for row in rows) or 1.0
    axes.set_xlim(-0.03 * most, 1.05 * most)
    axes.set_xlabel("context tokens computed per prompt (mean)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lowest = min(row.score.low for row in rows)
    axes.set_ylim(math.floor(max(lowest - 0.04, -0.02) * 20) / 20, 1.03)
    axes.set_ylabel("score")


def _cost_series(axes: Axes, points: Sequence[Row], style: SeriesStyle, theme: Theme) -> None:
    for row in points:
        ends = [row.score.low, row.score.high]
        axes.plot([row.rows.value] * 2, ends, color=style.color, alpha=0.4, linewidth=1.2)
    plot_estimates(
        axes,
        [row.rows.value for row in points],
        [row.score for row in points],
        style,
        theme,
        band_alpha=0,
        linestyle=style.dashes if is_swept(points) else "none",
        linewidth=1.3,
        markersize=5.5,
        zorder=3,
    )


def _front_line(theme: Theme) -> dict[str, Any]:
    return {"color": theme.ink, "alpha": 0.15, "linewidth": 9, "solid_capstyle": "round"}


class _Label(NamedTuple):
    """Texts for a point, the preferred one first, and the point in the units of the axes."""

    texts: Sequence[str]
    x: float
    y: float


def _front_labels(front: Sequence[Row], rows: Sequence[Row]) -> list[_Label]:
    """Return recipe and budget where the front changes to another recipe, the budget alone along one recipe.

    None at ratio 1: every recipe there is full attention, and a name would single one out.
    """
    sweeps = {name for name, points in rows_by_series(rows).items() if is_swept(points)}
    labels: list[_Label] = []
    previous = ""
    for row in front:
        budget = f"{row.budget:g}"
        texts = [] if row.series == previous else [f"{row.series} {budget}" if row.budget else row.series]
        if row.series in sweeps:
            texts.append(budget)
        if row.ratio != 1:
            labels.append(_Label(texts, row.rows.value, row.score.value))
        previous = row.series
    return labels


_LABEL_PLACES = (
    *(("right", -5, 4), ("center", 0, 7), ("right", -3, 10), ("center", 0, 12)),
    *(("right", -8, -4), ("left", 5, -11), ("left", 8, -4)),
)
"""Alignment and offset in points, best first."""


def _place_labels(axes: Axes, labels: Sequence[_Label]) -> None:
    """Write labels beside their points, in this order, where they cover nothing; leave out one that finds no place.

    The axes must have their final limits.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # the layout is not final before
    drawn = np.concatenate(list(_drawn_pixels(axes)))
    taken: list[Bbox] = []
    for label in labels:
        for attempt in _attempts(axes, label):
            box = _box(attempt)
            if _inside(axes, box) and not _touches(box, drawn) and not any(map(box.overlaps, taken)):
                taken.append(box)
                break
            attempt.remove()


def _attempts(axes: Axes, label: _Label) -> Iterator[Annotation]:
    for text in label.texts:
        for alignment, right, up in _LABEL_PLACES:
            yield axes.annotate(
                text, (label.x, label.y), xytext=(right, up), textcoords="offset points", ha=alignment, size=8
            )


def _inside(axes: Axes, box: Bbox) -> bool:
    frame = axes.get_window_extent()
    return bool(box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0)


def _box(label: Annotation) -> Bbox:
    label.update_positions(None)  # type: ignore[arg-type]
    return label.get_window_extent().padded(1)


def _drawn_pixels(axes: Axes) -> Iterator[NDArray[np.float64]]:
    """Return points along everything drawn, so close that no text fits between two."""
    for line in axes.get_lines():
        corners = line.get_transform().transform(np.column_stack(line.get_data()))
        yield corners
        for start, end in pairwise(corners):
            steps = int(np.hypot(*(end - start)) / 4) + 1
            yield start + (end - start) * np.linspace(0, 1, steps)[:, None]


def _touches(box: Bbox, points: NDArray[np.float64]) -> bool:
    margin = 3
    x, y = points.T
    return bool(
        ((x > box.x0 - margin) & (x < box.x1 + margin) & (y > box.y0 - margin) & (y < box.y1 + margin)).any()
    )
