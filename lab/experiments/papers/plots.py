"""Figures of claims, in the theme of the reports: curves over a varied quantity, and bars with intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.report.figures import (
    SeriesStyle,
    Theme,
    add_legend,
    legend_handle,
    new_figure,
    reference_line,
    series_styles,
)
from kvweave_lab.statistics import Estimate

Curve = Mapping[int, Estimate] | Mapping[float, Estimate]
"""Estimates by the value of the varied quantity."""

PANEL_IN = (3.6, 2.7)


def curves(
    heading: tuple[str, str],
    panels: Mapping[str, Mapping[str, Curve]],
    axis_labels: tuple[str, str],
    theme: Theme,
    lines: Mapping[str, Mapping[str, Estimate]] | None = None,
    scale: str = "linear",
) -> Figure:
    """Return a figure with a curve for each name in each panel, and 95 % intervals as bands.

    Args:
        heading: title and note.
        panels: curves by panel title and name.
        axis_labels: of the horizontal and the vertical axis.
        theme: colors.
        lines: baselines by panel title and name.
        scale: matplotlib's name for the horizontal axis's scale.
    """
    figure = new_figure(PANEL_IN[0] * max(2, len(panels)), PANEL_IN[1] + 0.5, *heading, theme)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    styles = series_styles(names, theme)
    baselines = lines or {}
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        for name, level in baselines.get(title, {}).items():
            axes.axhline(level.value, **_line_style(name, theme))
        for name, curve in panel.items():
            _curve(axes, curve, styles[name])
        axes.set_title(title)
        ticks = sorted({at for curve in panel.values() for at in curve})
        axes.set_xscale(scale)
        axes.set_xticks(ticks, [f"{at:g}" for at in ticks])
        axes.minorticks_off()
        axes.set_xlabel(axis_labels[0])
    grid[0].set_ylabel(axis_labels[1])
    levels = dict.fromkeys(name for panel in baselines.values() for name in panel)
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], **_line_style(name, theme)), name) for name in levels
    ]
    entries += [(legend_handle(styles[name], theme, line=True), name) for name in names]
    add_legend(figure, entries)
    return figure


def _line_style(name: str, theme: Theme) -> dict[str, Any]:
    return (
        reference_line(theme)
        if name == "full attention"
        else {"color": theme.ramp[2], "linewidth": 1.2, "linestyle": ":"}
    )


def _curve(axes: Axes, curve: Curve, style: SeriesStyle) -> None:
    points = sorted(curve.items(), key=lambda point: point[0])
    xs, estimates = [x for x, _ in points], [estimate for _, estimate in points]
    low, high = [one.low for one in estimates], [one.high for one in estimates]
    axes.fill_between(xs, low, high, color=style.color, alpha=0.12, linewidth=0)
    axes.plot(
        xs,
        [one.value for one in estimates],
        color=style.color,
        linestyle=style.dashes,
        marker=style.marker,
        markerfacecolor=style.color if style.filled else "none",
    )


def bars(
    heading: tuple[str, str],
    panels: Mapping[str, Mapping[str, Estimate]],
    names: Sequence[str],
    label: str,
    theme: Theme,
    at: float | None = None,
) -> Figure:
    """Return a figure with a bar for each name in each panel, and 95 % intervals as lines.

    `at` is the position of a reference line.
    """
    figure = new_figure(PANEL_IN[0] * max(2, len(panels)), 0.3 * len(names) + 1.0, *heading, theme)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    styles = series_styles(names, theme)
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        for place, name in enumerate(names):
            if name in panel:
                found = panel[name]
                axes.barh(place, found.value, height=0.7, color=styles[name].color, linewidth=0)
                axes.plot([found.low, found.high], [place, place], color=theme.ink, linewidth=1.2)
        if at is not None:
            axes.axvline(at, **reference_line(theme))
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
    grid[0].set_yticks(range(len(names)), names)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    return figure
