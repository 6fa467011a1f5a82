"""Figures that look alike in every report: themes, one style per series, headings, legends, intervals, PNG bytes."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.statistics import Estimate

DPI: Final = 160


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours on a light or a dark background.

    `ramp` shades the baselines from the one that repairs least to full attention: a rising contrast, readable
    without colour. The first six colours of `palette` (after Okabe and Ito) differ under the common colour
    blindnesses. Markers and dashes distinguish the others.
    """

    ground: str
    ink: str
    soft: str
    grid: str
    ramp: tuple[str, str, str, str]
    palette: tuple[str, ...]


LIGHT: Final = Theme(
    ground="#ffffff",
    ink="#1d2430",
    soft="#667085",
    grid="#e4e8ee",
    ramp=("#a9b5c7", "#7e8ca4", "#546279", "#1f2733"),
    palette=(
        *("#0072b2", "#d55e00", "#009e73", "#aa3377", "#d99a00", "#56b4e9"),
        *("#6a4fc2", "#7a4a1e", "#7c9a12", "#e0679f"),
    ),
)
DARK: Final = Theme(
    ground="#171b22",
    ink="#e8ebf0",
    soft="#98a2b3",
    grid="#2a313c",
    ramp=("#5f6d86", "#8492ab", "#adb8ca", "#eef1f6"),
    palette=(
        *("#4a9fe0", "#f07a3a", "#2fbf93", "#d668a6", "#f0c24b", "#a3dcf7"),
        *("#a692f0", "#c08a58", "#b5d24a", "#f5a3c7"),
    ),
)

BASELINES: Final = ("naive", "direct", "reuse", "full")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">", "h")

LineStyle = Literal["-", "--", ":"]
_ROUND_DASHES: Final[tuple[LineStyle, ...]] = ("-", "--", ":")


def render(draw: Callable[[Theme], Figure], theme: Theme = LIGHT) -> bytes:
    """Return a figure as PNG, drawn with the theme's settings. Leaves matplotlib's own settings unchanged."""
    with matplotlib.rc_context(rc_params(theme)):
        return to_png(draw(theme))


def to_png(figure: Figure) -> bytes:
    """Return the figure as PNG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class SeriesStyle:
    """How one recipe or other series looks in every figure and table.

    Attributes:
        color: on the theme's background.
        marker: matplotlib's name of a shape.
        dashes: matplotlib's name of a line style; the palette's second round is dashed.
        filled: whether markers are; the palette's second round is hollow.
    """

    color: str
    marker: str
    dashes: LineStyle
    filled: bool


def series_styles(names: Sequence[str], theme: Theme) -> Mapping[str, SeriesStyle]:
    """Return a style for every name and every baseline; the same names in the same order always look the same."""
    shades = dict(zip(BASELINES, theme.ramp, strict=True))
    styles = {
        name: SeriesStyle(shades[name], marker, "-", filled=True)
        for name, marker in zip(BASELINES, "v^oD", strict=True)
    }
    for number, name in enumerate(name for name in names if name not in shades):
        turn, place = divmod(number, len(theme.palette))
        marker = _MARKERS[number % len(_MARKERS)]
        dashes = _ROUND_DASHES[turn % len(_ROUND_DASHES)]
        styles[name] = SeriesStyle(theme.palette[place], marker, dashes, filled=turn % 2 == 0)
    return styles


def styles_of(names: Sequence[str], theme: Theme) -> dict[str, SeriesStyle]:
    """Return the styles of these names, without the baselines that are not among them."""
    styles = series_styles(names, theme)
    return {name: styles[name] for name in names}


def line_properties(style: SeriesStyle, theme: Theme) -> dict[str, Any]:
    """Return the properties of a series' line and markers, as matplotlib names them."""
    return {
        "color": style.color,
        "linestyle": style.dashes,
        "marker": style.marker,
        "markerfacecolor": style.color if style.filled else theme.ground,
    }


_HEADING_IN = 0.62
_EDGE_IN = 0.12


def new_figure(width_in: float, height_in: float, title: str, note: str, theme: Theme) -> Figure:
    """Return an empty figure with its heading; `height_in` is for what comes below the heading."""
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


_HANDLE_IN, _LETTER_IN = 0.55, 0.078  # of a legend entry


def add_legend(figure: Figure, entries: Sequence[tuple[Artist, str]]) -> None:
    """Add a legend below everything, in as many columns as fit."""
    longest = max(len(label) for _, label in entries)
    fitting = int(figure.get_figwidth() / (_HANDLE_IN + _LETTER_IN * longest))
    columns = max(1, min(fitting, len(entries)))
    # matplotlib fills column by column; in this order the entries read row by row.
    rowwise = [entry for first in range(columns) for entry in entries[first::columns]]
    figure.legend(
        [handle for handle, _ in rowwise],
        [label for _, label in rowwise],
        loc="outside lower left",
        ncols=columns,
        columnspacing=1.4,
        handlelength=2.4,
    )


def add_series_legend(figure: Figure, styles: Mapping[str, SeriesStyle], theme: Theme) -> None:
    """Add a legend below everything that names each of these series, all of them lines."""
    add_legend(figure, [(legend_handle(style, theme, line=True), name) for name, style in styles.items()])


def legend_handle(style: SeriesStyle, theme: Theme, *, line: bool) -> Line2D:
    """Return a series' symbol for a legend, with or without a line."""
    shown = line_properties(style, theme) | ({} if line else {"linestyle": "none"})
    return Line2D([], [], **shown)


def plot_estimates(
    axes: Axes,
    places: Sequence[float],
    estimates: Sequence[Estimate],
    style: SeriesStyle,
    theme: Theme,
    *,
    band_alpha: float = 0.12,
    **line: Any,
) -> None:
    """Draw a line with markers through estimates, and their intervals as a band.

    A `band_alpha` of 0 draws no band. `line` are further properties of the line, as matplotlib names them.
    """
    if band_alpha:
        low, high = [one.low for one in estimates], [one.high for one in estimates]
        axes.fill_between(places, low, high, color=style.color, alpha=band_alpha, linewidth=0)
    axes.plot(places, [one.value for one in estimates], **line_properties(style, theme) | line)


def reference_line(theme: Theme) -> dict[str, Any]:
    """Return the line properties of full attention, which are the same in every figure."""
    return {"color": theme.ramp[-1], "linestyle": (0, (5, 3)), "linewidth": 1.2}


def shades(theme: Theme) -> LinearSegmentedColormap:
    """Return the colour map of heat maps, from the background to the theme's first colour."""
    return LinearSegmentedColormap.from_list("shades", [theme.ground, theme.palette[0]])


QUARTERS = {0: "0", 0.25: ".25", 0.5: ".5", 0.75: ".75", 1: "1"}
"""The ticks of a score and of a ratio, and their labels."""

_UNLABELLED = [""] * len(QUARTERS)


def score_axis(axes: Axes, lowest: float, *, labelled: bool) -> None:
    """Set the vertical axis for a score, from the quarter below `lowest` to 1."""
    floor = math.floor(lowest * 4) / 4
    axes.set_yticks(list(QUARTERS), list(QUARTERS.values()) if labelled else _UNLABELLED)
    axes.set_ylim(floor - 0.02, 1.03)
    axes.set_ylabel("score" if labelled else "")


def ratio_axis(axes: Axes, *, labelled: bool) -> None:
    """Set the horizontal axis for a ratio, 0..1."""
    axes.set_xticks(list(QUARTERS), list(QUARTERS.values()) if labelled else _UNLABELLED)
    axes.set_xlim(-0.07, 1.07)
    axes.set_xlabel("ratio" if labelled else "")


def rc_params(theme: Theme) -> dict[Any, Any]:
    """Return matplotlib's settings for a theme, for `rc_context`."""
    return {
        "figure.facecolor": theme.ground,
        "savefig.facecolor": theme.ground,
        "axes.facecolor": theme.ground,
        "axes.edgecolor": theme.soft,
        "axes.labelcolor": theme.soft,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.labelsize": 9,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "text.color": theme.ink,
        "text.parse_math": False,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.6,
        "lines.markersize": 4.5,
        "xtick.color": theme.soft,
        "ytick.color": theme.soft,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }
