"""All figures of an evaluation as PNG, on light and on dark ground."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from kvweave.recipes.methods import METHODS
from kvweave_lab.eval.matrix import Matrix
from kvweave_lab.eval.report import slices
from kvweave_lab.eval.report.baselines import baselines
from kvweave_lab.eval.report.by_ratio import by_ratio
from kvweave_lab.eval.report.heat_map import heat_map
from kvweave_lab.eval.report.pareto import pareto
from kvweave_lab.eval.report.sheet import png
from kvweave_lab.eval.report.style import DARK, DPI, LIGHT, Look, Theme, looks, settings
from kvweave_lab.eval.results import FULL, Row


class _Kind(NamedTuple):
    name: str
    caption: str
    draw: Callable[[Sequence[Row], Mapping[str, Look], Theme], Figure]


_PER_TASK = _Kind(
    "score-per-task",
    "The gap between full attention and reuse is what recomputing selected tokens can win back.",
    baselines,
)
_BY_RATIO = _Kind(
    "score-by-ratio",
    "A line is a recipe. One that can only be left as it is or recomputed whole has markers without a line;"
    " markers at the same ratio stand side by side.",
    by_ratio,
)
_BY_COST = _Kind(
    "score-by-cost",
    "Up and to the left is better. The front joins what nothing beats at the same or a lower cost; where"
    " intervals overlap, the order of two points is not settled.",
    pareto,
)


_MOST = 24  # recipes in one figure
_MATRIX = "matrix"
_MATRIX_CAPTION = (
    "Rows are selectors, columns preparations. The stronger the shade, the higher the score; n is the share of full"
    " attention's gain over reuse; below stands the difference from the same selector on isolated chunks, bold where its"
    " interval leaves out 0."
)
_NAME = re.compile(
    "(?:" + "|".join(kind.name for kind in (_PER_TASK, _BY_RATIO, _BY_COST)) + rf"|{_MATRIX}-[\d.]+)(?:-\d+)?"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure.

    Attributes:
        name: of its file, without the suffix.
        title: what it shows, for readers who do not see it.
        context_tokens: the length it is about.
        caption: what a reader should look at.
        light: PNG on light ground.
        dark: the same on dark ground.
    """

    name: str
    title: str
    context_tokens: int
    caption: str
    light: bytes
    dark: bytes

    @property
    def width_px(self) -> int:
        """Width at which its letters are as large as a page's small print: 100 pixels an inch."""
        return int.from_bytes(self.light[16:20]) * 100 // DPI  # PNG: the width stands at the head


def pictures(rows: Sequence[Row], matrices: Sequence[Matrix] = ()) -> Iterator[Picture]:
    """Every figure, length by length; a recipe has one colour and marker in all of them.

    More recipes than can be told apart are left to the matrices, where those run on a preparation not their own.
    """
    if len(slices.recipes(rows)) > _MOST:
        crossed = {cell.recipe for matrix in matrices for cell in matrix.cells}
        rows = [row for row in rows if row.recipe not in crossed or row.recipe in METHODS]
    recipes = slices.recipes(rows)
    for context_tokens in slices.lengths(rows):
        here = slices.at_length(rows, context_tokens)
        whole = slices.overall(here)
        yield _picture(_PER_TASK, here, recipes)
        yield _picture(_BY_RATIO, here, recipes)
        if any(row.rows.value > 0 for row in whole if row.recipe != FULL):
            yield _picture(_BY_COST, whole, recipes)
        yield from (_heat_map(matrix) for matrix in matrices if matrix.context_tokens == context_tokens)


def is_picture(name: str) -> bool:
    """Whether a report's figure can have this name, without the suffix."""
    return _NAME.fullmatch(name) is not None


def _picture(kind: _Kind, rows: Sequence[Row], recipes: Sequence[str]) -> Picture:
    images = _on_both_grounds(lambda theme: kind.draw(rows, looks(recipes, theme), theme))
    return _named(kind.name, rows[0].context_tokens, kind.caption, images)


def _heat_map(matrix: Matrix) -> Picture:
    images = _on_both_grounds(lambda theme: heat_map(matrix, theme))
    return _named(f"{_MATRIX}-{matrix.ratio:g}", matrix.context_tokens, _MATRIX_CAPTION, images)


def _on_both_grounds(draw: Callable[[Theme], Figure]) -> list[bytes]:
    images = []
    for theme in (LIGHT, DARK):
        with matplotlib.rc_context(settings(theme)):
            images.append(png(draw(theme)))
    return images


def _named(name: str, context_tokens: int, caption: str, images: Sequence[bytes]) -> Picture:
    title = f"{name.replace('-', ' ')}, {slices.length_named(context_tokens)}"
    file = f"{name}-{context_tokens}" if context_tokens else name
    return Picture(file, title, context_tokens, caption, *images)
