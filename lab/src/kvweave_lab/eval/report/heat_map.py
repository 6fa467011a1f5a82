"""A matrix of preparations and selectors as a figure: the stronger a shade, the higher the score."""

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from kvweave_lab.eval.matrix import Cell, Matrix
from kvweave_lab.eval.report import slices
from kvweave_lab.eval.report.sheet import sheet
from kvweave_lab.eval.report.style import Theme
from kvweave_lab.eval.results import Estimate

_CELL_IN = (1.45, 0.5)
_NAMES_IN = 1.7
_STRONGEST = 0.55  # of the accent's strength, so that letters stay legible on it


def heat_map(matrix: Matrix, theme: Theme) -> Figure:
    """Score with its interval, normalised score, and the difference from isolated chunks."""
    figure = sheet(
        len(matrix.preparations) * _CELL_IN[0] + _NAMES_IN,
        len(matrix.selectors) * _CELL_IN[1] + 0.5,
        "Score by preparation and selector",
        f"{slices.length_named(matrix.context_tokens)} · ratio {matrix.ratio:g} · n: normalised · ±: half of the 95 % interval",
        theme,
    )
    axes = figure.subplots()
    values = [cell.score.value for cell in matrix.cells]
    shades = Normalize(min(values), max(max(values), min(values) + 0.05))
    colours = LinearSegmentedColormap.from_list("scores", [theme.ground, theme.palette[0]])
    for y, selector in enumerate(matrix.selectors):
        for x, preparation in enumerate(matrix.preparations):
            cell = matrix.cell(selector, preparation)
            if cell is not None:
                strength = _STRONGEST * float(shades(cell.score.value))
                axes.axvspan(x - 0.5, x + 0.5, *_band(y, matrix), color=colours(strength), linewidth=1)
                _write(axes, x, y, cell, theme)
    axes.set_xlim(-0.5, len(matrix.preparations) - 0.5)
    axes.set_ylim(len(matrix.selectors) - 0.5, -0.5)
    axes.set_xticks(range(len(matrix.preparations)), matrix.preparations, color=theme.ink, size=9)
    axes.set_yticks(range(len(matrix.selectors)), matrix.selectors, color=theme.ink, size=9)
    axes.xaxis.tick_top()
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _band(row: int, matrix: Matrix) -> tuple[float, float]:
    """Where a selector's row lies in the axes' height, 0..1 from below."""
    rows = len(matrix.selectors)
    return 1 - (row + 1) / rows, 1 - row / rows


def _write(axes: Axes, x: int, y: int, cell: Cell, theme: Theme) -> None:
    share = "" if cell.normalised is None else f"  n {cell.normalised.value:.2f}"
    score = f"{cell.score.value:.3f} ±{_half(cell.score)}"
    above = y if cell.gain is None else y - 0.16
    axes.text(x, above, score + share, ha="center", va="center", size=8, color=theme.ink)
    if cell.gain is not None:
        certain = cell.gain.low > 0 or cell.gain.high < 0
        axes.text(
            x,
            y + 0.2,
            f"{cell.gain.value:+.3f} ±{_half(cell.gain)}",
            ha="center",
            va="center",
            size=7.5,
            color=theme.ink,
            weight="bold" if certain else "normal",
        )


def _half(estimate: Estimate) -> str:
    return f"{slices.margin(estimate):.3f}".removeprefix("0")
