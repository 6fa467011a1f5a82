"""Score against ratio: one panel per task, one line per recipe. What ran by coverage has no ratio and no place here."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.eval.report import slices
from kvweave_lab.eval.report.sheet import full_line, legend_below, ratio_ticks, score_ticks, sheet, sign
from kvweave_lab.eval.report.style import Look, Theme
from kvweave_lab.eval.results import FULL, Row

_APART = 0.024  # between points that stand at the same ratio
_FEW = 6  # lines in a panel; more are drawn thinner, and once in a large panel
_LARGE_IN = 3.8


def by_ratio(rows: Sequence[Row], looks: Mapping[str, Look], theme: Theme) -> Figure:
    """Rows of one length; a dashed line is full attention, bands and bars are 95 % intervals."""
    rows = [row for row in rows if row.coverage is None]
    names = slices.panels(rows)
    crowded = len(names) > 1 and _lines(rows) > _FEW
    small = names[1:] if crowded else names
    columns = _columns(len(small))
    lines = math.ceil(len(small) / columns)
    size = _size(columns, lines)
    figure = sheet(
        size[0],
        size[1] + (_LARGE_IN if crowded else 0),
        "Score by share of stale tokens recomputed",
        f"{slices.length_named(rows[0].context_tokens)} · bands and bars: 95 % interval",
        theme,
    )
    lowest = min(row.score.low for row in rows)
    above = [_LARGE_IN] if crowded else []
    grid = figure.add_gridspec(len(above) + lines, columns, height_ratios=above + [size[1] / lines] * lines)
    if crowded:  # the first panel, usually the mean over tasks, has the whole width
        _draw(figure.add_subplot(grid[0, :]), names[0], rows, looks, theme, lowest, left=True, bottom=True)
    for place, name in enumerate(small):
        row, column = divmod(place, columns)
        axes = figure.add_subplot(grid[len(above) + row, column])
        bottom = place + columns >= len(small)
        _draw(axes, name, rows, looks, theme, lowest, left=column == 0, bottom=bottom)
    legend_below(figure, _legend(rows, looks, theme))
    return figure


def _draw(
    axes: Axes,
    name: str,
    rows: Sequence[Row],
    looks: Mapping[str, Look],
    theme: Theme,
    lowest: float,
    *,
    left: bool,
    bottom: bool,
) -> None:
    """One task's panel; axes are named at the left and at the bottom."""
    _panel(axes, slices.of_task(rows, name), looks, theme)
    axes.set_title(name)
    score_ticks(axes, lowest, named=left)
    ratio_ticks(axes, named=bottom)


def _lines(rows: Sequence[Row]) -> int:
    """How many recipes are lines in one of the panels."""
    return sum(name != FULL and _any_swept(points) for name, points in slices.by_recipe(rows).items())


def _columns(panels: int) -> int:
    if panels <= 3:
        return panels
    return 2 if panels == 4 else 3 if panels in (5, 6, 9) else 4


def _size(columns: int, lines: int) -> tuple[float, float]:
    """Inches: one panel is large, many are small."""
    panel = {1: (7.2, 4.0), 2: (4.4, 3.1), 3: (3.5, 2.5)}.get(columns, (2.75, 2.2))
    return panel[0] * columns, panel[1] * lines + 0.6


def _panel(axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look], theme: Theme) -> None:
    full = rows[0].full_score
    axes.axhspan(full.low, full.high, color=theme.ramp[-1], alpha=0.08, linewidth=0)
    axes.axhline(full.value, **full_line(theme))
    drawn = {name: points for name, points in slices.by_recipe(rows).items() if name != FULL}
    shifts = _shifts(drawn)
    few = sum(map(slices.swept, drawn.values())) <= _FEW
    for name, points in drawn.items():
        look = looks[name]
        if slices.swept(points):
            _line(axes, points, look, few=few)
        else:
            _points(axes, points, look, theme, shifts)


def _line(axes: Axes, points: Sequence[Row], look: Look, *, few: bool) -> None:
    ratios = [row.budget for row in points]
    low, high = [row.score.low for row in points], [row.score.high for row in points]
    axes.fill_between(ratios, low, high, color=look.color, alpha=0.15 if few else 0.07, linewidth=0)
    axes.plot(
        ratios,
        [row.score.value for row in points],
        color=look.color,
        linestyle=look.dashes,
        linewidth=1.6 if few else 1.1,
        marker=look.marker,
        markersize=3.4 if few else 2.8,
        markerfacecolor=look.color if look.filled else "none",
        zorder=3,
    )


def _points(
    axes: Axes, points: Sequence[Row], look: Look, theme: Theme, shifts: Mapping[tuple[str, float], float]
) -> None:
    for row in points:
        x = row.budget + shifts[row.recipe, row.budget]
        axes.plot([x, x], [row.score.low, row.score.high], color=look.color, linewidth=1.3, zorder=4)
        axes.plot(
            [x],
            [row.score.value],
            color=look.color,
            marker=look.marker,
            markersize=5,
            markerfacecolor=look.color if look.filled else theme.ground,
            zorder=5,
        )


def _shifts(drawn: Mapping[str, Sequence[Row]]) -> dict[tuple[str, float], float]:
    """Single points at the same ratio stand side by side, so that no interval hides another."""
    crowds: dict[float, list[str]] = {}
    for name, points in drawn.items():
        if not slices.swept(points):
            for row in points:
                crowds.setdefault(row.budget, []).append(name)
    shifts = {}
    for ratio, crowd in crowds.items():
        for place, name in enumerate(crowd):
            shifts[name, ratio] = (place - (len(crowd) - 1) / 2) * _APART
    return shifts


def _legend(rows: Sequence[Row], looks: Mapping[str, Look], theme: Theme) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [(Line2D([], [], **full_line(theme)), "full attention")]
    for name, points in slices.by_recipe(rows).items():
        if name != FULL:
            entries.append((sign(looks[name], theme, line=_any_swept(points)), name))
    return entries


def _any_swept(points: Sequence[Row]) -> bool:
    return any(slices.swept(slices.of_task(points, task)) for task in {row.task for row in points})
