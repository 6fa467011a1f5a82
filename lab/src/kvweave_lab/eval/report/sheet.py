"""A figure's paper: size, heading, legend outside the axes, PNG bytes. Knows nothing of what is drawn."""

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.eval.report.style import DPI, Look, Theme

_HEADING_IN = 0.62
_EDGE_IN = 0.12
_SIGN_IN, _LETTER_IN = 0.55, 0.078  # of a legend entry
QUARTERS = {0: "0", 0.25: ".25", 0.5: ".5", 0.75: ".75", 1: "1"}
"""Where a score's and a ratio's ticks stand, and what is written there."""

_UNNAMED = [""] * len(QUARTERS)


def sheet(width_in: float, height_in: float, title: str, note: str, theme: Theme) -> Figure:
    """An empty figure with its heading; `height_in` is for what comes below the heading."""
    height_in += _HEADING_IN
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    edge_x, edge_y = _EDGE_IN / width_in, _EDGE_IN / height_in
    below = 1 - _HEADING_IN / height_in
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(edge_x / 2, edge_y / 2, 1 - edge_x, below - edge_y / 2))  # type: ignore[call-arg]  # of its subclass
    figure.text(edge_x, 1 - edge_y, title, size=12.5, weight="bold", va="top")
    figure.text(edge_x, 1 - edge_y - 0.25 / height_in, note, size=9, color=theme.soft, va="top")
    return figure


def legend_below(figure: Figure, entries: Sequence[tuple[Artist, str]]) -> None:
    """A legend under everything, in as many columns as fit."""
    longest = max(len(label) for _, label in entries)
    fitting = int(figure.get_figwidth() / (_SIGN_IN + _LETTER_IN * longest))
    columns = max(1, min(fitting, len(entries)))
    # matplotlib fills column by column; in this order the entries read row by row.
    rowwise = [entry for first in range(columns) for entry in entries[first::columns]]
    figure.legend(
        [sign for sign, _ in rowwise],
        [label for _, label in rowwise],
        loc="outside lower left",
        ncols=columns,
        columnspacing=1.4,
        handlelength=2.4,
    )


def score_ticks(axes: Axes, lowest: float, *, named: bool) -> None:
    """The vertical axis of a score, from the quarter below `lowest` to 1; labels are for the panels at the left."""
    floor = math.floor(lowest * 4) / 4
    axes.set_yticks(list(QUARTERS), list(QUARTERS.values()) if named else _UNNAMED)
    axes.set_ylim(floor - 0.02, 1.03)
    axes.set_ylabel("score" if named else "")


def ratio_ticks(axes: Axes, *, named: bool) -> None:
    """The horizontal axis of a ratio, 0..1; labels are for the panels at the bottom."""
    axes.set_xticks(list(QUARTERS), list(QUARTERS.values()) if named else _UNNAMED)
    axes.set_xlim(-0.07, 1.07)
    axes.set_xlabel("ratio" if named else "")


def full_line(theme: Theme) -> dict[str, Any]:
    """How full attention's score stands in every figure."""
    return {"color": theme.ramp[-1], "linestyle": (0, (5, 3)), "linewidth": 1.2}


def sign(look: Look, theme: Theme, *, line: bool) -> Line2D:
    """How a recipe stands in a legend."""
    return Line2D(
        [],
        [],
        color=look.color,
        linestyle=look.dashes if line else "none",
        marker=look.marker,
        markerfacecolor=look.color if look.filled else theme.ground,
    )


def png(figure: Figure) -> bytes:
    """The figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()
