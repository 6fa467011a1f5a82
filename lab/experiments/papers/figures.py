"""How claims are drawn: curves over something that is varied, and bars with intervals, in the looks of the reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.eval.report.sheet import full_line, legend_below, sheet, sign
from kvweave_lab.eval.report.style import Look, Theme, looks
from kvweave_lab.eval.results import Estimate

Curve = Mapping[int, Estimate] | Mapping[float, Estimate]
"""What is varied, and what it comes to."""

PANEL_IN = (3.6, 2.7)


def curves(
    heading: tuple[str, str],
    panels: Mapping[str, Mapping[str, Curve]],
    axes_named: tuple[str, str],
    theme: Theme,
    lines: Mapping[str, Mapping[str, Estimate]] | None = None,
    scale: str = "linear",
) -> Figure:
    """A panel each with a curve per name, bands being 95 % intervals; `lines` are baselines by panel and name.

    `heading` is title and note, `axes_named` what runs along each of the two axes; `scale` is matplotlib's
    name for how the first one is spaced.
    """
    figure = sheet(PANEL_IN[0] * max(2, len(panels)), PANEL_IN[1] + 0.5, *heading, theme)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    chosen = looks(names, theme)
    given = lines or {}
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        for name, level in given.get(title, {}).items():
            axes.axhline(level.value, **_level(name, theme))
        for name, curve in panel.items():
            _curve(axes, curve, chosen[name])
        axes.set_title(title)
        ticks = sorted({at for curve in panel.values() for at in curve})
        axes.set_xscale(scale)
        axes.set_xticks(ticks, [f"{at:g}" for at in ticks])
        axes.minorticks_off()
        axes.set_xlabel(axes_named[0])
    grid[0].set_ylabel(axes_named[1])
    levels = dict.fromkeys(name for panel in given.values() for name in panel)
    entries: list[tuple[Artist, str]] = [(Line2D([], [], **_level(name, theme)), name) for name in levels]
    entries += [(sign(chosen[name], theme, line=True), name) for name in names]
    legend_below(figure, entries)
    return figure


def _level(name: str, theme: Theme) -> dict[str, Any]:
    return (
        full_line(theme)
        if name == "full attention"
        else {"color": theme.ramp[2], "linewidth": 1.2, "linestyle": ":"}
    )


def _curve(axes: Axes, curve: Curve, look: Look) -> None:
    points = sorted(curve.items(), key=lambda point: point[0])
    places, found = [at for at, _ in points], [one for _, one in points]
    low, high = [one.low for one in found], [one.high for one in found]
    axes.fill_between(places, low, high, color=look.color, alpha=0.12, linewidth=0)
    axes.plot(
        places,
        [one.value for one in found],
        color=look.color,
        linestyle=look.dashes,
        marker=look.marker,
        markerfacecolor=look.color if look.filled else "none",
    )


def bars(
    heading: tuple[str, str],
    panels: Mapping[str, Mapping[str, Estimate]],
    names: Sequence[str],
    label: str,
    theme: Theme,
    at: float | None = None,
) -> Figure:
    """A panel each with a bar per name, lines being 95 % intervals; `at` is where a line marks what to compare with."""
    figure = sheet(PANEL_IN[0] * max(2, len(panels)), 0.3 * len(names) + 1.0, *heading, theme)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    chosen = looks(names, theme)
    for axes, (title, panel) in zip(grid, panels.items(), strict=True):
        for place, name in enumerate(names):
            if name in panel:
                found = panel[name]
                axes.barh(place, found.value, height=0.7, color=chosen[name].color, linewidth=0)
                axes.plot([found.low, found.high], [place, place], color=theme.ink, linewidth=1.2)
        if at is not None:
            axes.axvline(at, **full_line(theme))
        axes.set_title(title)
        axes.set_xlabel(label)
        axes.grid(visible=False, axis="y")
    grid[0].set_yticks(range(len(names)), names)
    grid[0].set_ylim(len(names) - 0.5, -0.5)
    return figure
