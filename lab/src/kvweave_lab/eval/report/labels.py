"""Names beside points, where they cover nothing that is drawn; one that finds no such place is left out."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

_PLACES = (
    *(("right", -5, 4), ("center", 0, 7), ("right", -3, 10), ("center", 0, 12)),
    *(("right", -8, -4), ("left", 5, -11), ("left", 8, -4)),
)
"""Alignment and offset in points, best first."""


class Name(NamedTuple):
    """Texts for a point, the one that is wanted most first, and where the point is in the units of the axes."""

    texts: Sequence[str]
    x: float
    y: float


def place_names(axes: Axes, names: Sequence[Name]) -> None:
    """Write names beside their points, those given first first. The axes must have their final limits."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # only now does the layout stand
    drawn = np.concatenate(list(_pixels(axes)))
    taken: list[Bbox] = []
    for name in names:
        for label in _attempts(axes, name):
            box = _box(label)
            if _inside(axes, box) and not _touches(box, drawn) and not any(map(box.overlaps, taken)):
                taken.append(box)
                break
            label.remove()


def _attempts(axes: Axes, name: Name) -> Iterator[Annotation]:
    for text in name.texts:
        for alignment, right, up in _PLACES:
            yield axes.annotate(
                text, (name.x, name.y), xytext=(right, up), textcoords="offset points", ha=alignment, size=8
            )


def _inside(axes: Axes, box: Bbox) -> bool:
    frame = axes.get_window_extent()
    return bool(box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0)


def _box(label: Annotation) -> Bbox:
    label.update_positions(None)  # type: ignore[arg-type]
    return label.get_window_extent().padded(1)


def _pixels(axes: Axes) -> Iterator[NDArray[np.float64]]:
    """Points along everything drawn, close enough to each other that no text slips between two."""
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
