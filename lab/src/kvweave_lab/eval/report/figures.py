"""All figures of an evaluation as PNG, on a light and on a dark background; bars and heat maps are drawn here."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvweave.recipes.methods import METHODS
from kvweave_lab.eval.comparisons import Cell, Matrix
from kvweave_lab.eval.outcomes import FULL, REUSE
from kvweave_lab.eval.report.curves import score_by_cost, score_by_ratio
from kvweave_lab.eval.rows import (
    OVERALL,
    Row,
    context_lengths,
    length_text,
    overall_rows,
    panel_names,
    rows_at_length,
    rows_of_task,
    series_names,
)
from kvweave_lab.report import margin_text
from kvweave_lab.report.figures import (
    BASELINES,
    DARK,
    LIGHT,
    QUARTERS,
    SeriesStyle,
    Theme,
    add_legend,
    new_figure,
    render,
    series_styles,
    shades,
)
from kvweave_lab.statistics import Estimate

_MOST_SERIES = 24  # in one figure


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure.

    Attributes:
        name: of its file, without the suffix.
        title: what it shows, for readers who do not see it.
        context_tokens: the context length of its rows.
        caption: what a reader should look at.
        light: PNG on a light background.
        dark: the same on a dark background.
    """

    name: str
    title: str
    context_tokens: int
    caption: str
    light: bytes
    dark: bytes


def pictures(rows: Sequence[Row], matrices: Sequence[Matrix] = ()) -> Iterator[Picture]:
    """Return every figure, length by length; a recipe has one colour and marker in all of them.

    If there are too many recipes for one figure, those on a preparation other than their own appear in the matrices
    only.
    """
    if len(series_names(rows)) > _MOST_SERIES:
        crossed = {cell.recipe for matrix in matrices for cell in matrix.cells}
        rows = [row for row in rows if row.recipe not in crossed or row.recipe in METHODS]
    names = series_names(rows)
    for context_tokens in context_lengths(rows):
        at_length = rows_at_length(rows, context_tokens)
        overall = overall_rows(at_length)
        yield _picture(_PER_TASK, at_length, names)
        yield _picture(_BY_RATIO, at_length, names)
        if any(row.rows.value > 0 for row in overall if row.recipe != FULL):
            yield _picture(_BY_COST, overall, names)
        yield from (_matrix_picture(each) for each in matrices if each.context_tokens == context_tokens)


def is_picture(name: str) -> bool:
    """Return whether a report's figure can have this name, without the suffix."""
    return _NAME.fullmatch(name) is not None


_BAR_IN = 0.12
_GAP_IN = 0.17  # between two tasks


def score_per_task(rows: Sequence[Row], styles: Mapping[str, SeriesStyle], theme: Theme) -> Figure:
    """Draw full attention and the recipes that recompute nothing as bars, for rows of one length.

    A recipe without rows has no bar.
    """
    names = panel_names(rows)
    found = [(name, _baseline_scores(rows_of_task(rows, name))) for name in names]
    shown = [recipe for recipe in reversed(BASELINES) if any(recipe in scores for _, scores in found)]
    group_in = len(shown) * _BAR_IN + _GAP_IN
    figure = new_figure(
        6.6,
        len(names) * group_in + 0.9,
        "Full attention and plain reuse",
        f"{length_text(rows[0].context_tokens)} · lines: 95 % interval",
        theme,
    )
    axes = figure.subplots()
    thickness = _BAR_IN / group_in
    for place, (_, scores) in enumerate(found):
        for number, recipe in enumerate(shown):
            if recipe in scores:
                y = place + (number - (len(shown) - 1) / 2) * thickness
                _bar(axes, y, thickness, scores[recipe], styles[recipe].color, theme)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for label in axes.set_yticks(range(len(names)), names, color=theme.ink, size=9):
        label.label1.set_fontweight("bold" if label.label1.get_text() == OVERALL else "normal")
    axes.set_xticks(list(QUARTERS), list(QUARTERS.values()))
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("score")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    handles = (Patch(color=styles[recipe].color, linewidth=0) for recipe in shown)
    add_legend(figure, [(handle, _BASELINE_NAMES[name]) for handle, name in zip(handles, shown, strict=True)])
    return figure


_BASELINE_NAMES = {
    "full": "full attention",
    "reuse": "reuse (after the system prefix)",
    "direct": "direct (alone, positions moved)",
    "naive": "naive (alone, positions as stored)",
}


def _baseline_scores(rows: Sequence[Row]) -> dict[str, Estimate]:
    """Return the scores by recipe; of naive and direct those without recomputing."""
    scores = {FULL: rows[0].full_score, REUSE: rows[0].reuse_score}
    plain = {row.recipe: row.score for row in rows if row.recipe in BASELINES and row.ratio == 0}
    return plain | scores


def _bar(axes: Axes, y: float, thickness: float, score: Estimate, color: str, theme: Theme) -> None:
    axes.barh(y, score.value, height=thickness * 0.84, color=color, linewidth=0)
    for start, end, shade in ((score.low, score.value, theme.ground), (score.value, score.high, color)):
        axes.plot([start, end], [y, y], color=shade, linewidth=1.3, solid_capstyle="butt", zorder=3)


_CELL_IN = (1.45, 0.5)
_NAMES_IN = 1.7
_STRONGEST = 0.55  # of the accent's strength, so that letters stay legible on it


def matrix_heat_map(matrix: Matrix, theme: Theme) -> Figure:
    """Draw each cell's score with its interval, normalised score, and difference from isolated chunks.

    The stronger a cell's shade, the higher its score.
    """
    figure = new_figure(
        len(matrix.preparations) * _CELL_IN[0] + _NAMES_IN,
        len(matrix.selectors) * _CELL_IN[1] + 0.5,
        "Score by preparation and selector",
        f"{length_text(matrix.context_tokens)} · ratio {matrix.ratio:g} · n: normalised · ±: half of the 95 % interval",
        theme,
    )
    axes = figure.subplots()
    values = [cell.score.value for cell in matrix.cells]
    strengths = Normalize(min(values), max(max(values), min(values) + 0.05))
    colours = shades(theme)
    for y, selector in enumerate(matrix.selectors):
        for x, preparation in enumerate(matrix.preparations):
            cell = matrix.cell(selector, preparation)
            if cell is not None:
                strength = _STRONGEST * float(strengths(cell.score.value))
                axes.axvspan(x - 0.5, x + 0.5, *_row_extent(y, matrix), color=colours(strength), linewidth=1)
                _write_cell(axes, x, y, cell, theme)
    axes.set_xlim(-0.5, len(matrix.preparations) - 0.5)
    axes.set_ylim(len(matrix.selectors) - 0.5, -0.5)
    axes.set_xticks(range(len(matrix.preparations)), matrix.preparations, color=theme.ink, size=9)
    axes.set_yticks(range(len(matrix.selectors)), matrix.selectors, color=theme.ink, size=9)
    axes.xaxis.tick_top()
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _row_extent(row: int, matrix: Matrix) -> tuple[float, float]:
    """Return the bottom and top of a selector's row in the axes' height, 0..1 from below."""
    rows = len(matrix.selectors)
    return 1 - (row + 1) / rows, 1 - row / rows


def _write_cell(axes: Axes, x: int, y: int, cell: Cell, theme: Theme) -> None:
    share = "" if cell.normalised is None else f"  n {cell.normalised.value:.2f}"
    score = f"{cell.score.value:.3f} {margin_text(cell.score)}"
    above = y if cell.gain is None else y - 0.16
    axes.text(x, above, score + share, ha="center", va="center", size=8, color=theme.ink)
    if cell.gain is not None:
        certain = cell.gain.low > 0 or cell.gain.high < 0
        axes.text(
            x,
            y + 0.2,
            f"{cell.gain.value:+.3f} {margin_text(cell.gain)}",
            ha="center",
            va="center",
            size=7.5,
            color=theme.ink,
            weight="bold" if certain else "normal",
        )


class _Kind(NamedTuple):
    name: str
    caption: str
    draw: Callable[[Sequence[Row], Mapping[str, SeriesStyle], Theme], Figure]


_PER_TASK = _Kind(
    "score-per-task",
    "The gap between full attention and reuse is what recomputing selected tokens can win back.",
    score_per_task,
)
_BY_RATIO = _Kind(
    "score-by-ratio",
    "Each line is a recipe. A recipe that recomputes nothing or everything has markers without a line;"
    " markers at the same ratio are drawn side by side.",
    score_by_ratio,
)
_BY_COST = _Kind(
    "score-by-cost",
    "Up and to the left is better. The front joins what nothing beats at the same or a lower cost; where"
    " intervals overlap, the order of two points is not settled.",
    score_by_cost,
)
_MATRIX = "matrix"
_MATRIX_CAPTION = (
    "Rows are selectors, columns preparations. The stronger the shade, the higher the score; n is the share of full"
    " attention's gain over reuse; below it is the difference from the same selector on isolated chunks, bold if its"
    " interval leaves out 0."
)
_NAME = re.compile(
    "(?:" + "|".join(kind.name for kind in (_PER_TASK, _BY_RATIO, _BY_COST)) + rf"|{_MATRIX}-[\d.]+)(?:-\d+)?"
)


def _picture(kind: _Kind, rows: Sequence[Row], names: Sequence[str]) -> Picture:
    def draw(theme: Theme) -> Figure:
        return kind.draw(rows, series_styles(names, theme), theme)

    return _drawn(kind.name, rows[0].context_tokens, kind.caption, draw)


def _matrix_picture(matrix: Matrix) -> Picture:
    def draw(theme: Theme) -> Figure:
        return matrix_heat_map(matrix, theme)

    return _drawn(f"{_MATRIX}-{matrix.ratio:g}", matrix.context_tokens, _MATRIX_CAPTION, draw)


def _drawn(name: str, context_tokens: int, caption: str, draw: Callable[[Theme], Figure]) -> Picture:
    title = f"{name.replace('-', ' ')}, {length_text(context_tokens)}"
    file = f"{name}-{context_tokens}" if context_tokens else name
    return Picture(file, title, context_tokens, caption, render(draw, LIGHT), render(draw, DARK))
