"""Speed-up question by question, and how much is stored and held in memory meanwhile."""

import statistics

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.bench.steady_results import SteadyBench
from kvweave_lab.eval.report.sheet import legend_below, png, sheet
from kvweave_lab.eval.report.style import LIGHT, Theme, settings

_SIZE_IN = (8.0, 5.2)
_WINDOW = 21
"""Questions in a running median."""


def steady_plot(done: SteadyBench, theme: Theme = LIGHT) -> bytes:
    """PNG: a dot for every question, their running median, a bar for each quarter; below it, sizes."""
    with matplotlib.rc_context(settings(theme)):
        return png(_drawn(done, theme))


def _drawn(done: SteadyBench, theme: Theme) -> Figure:
    asked = done.settings
    figure = sheet(
        *_SIZE_IN,
        "Speed-up to the first token, question by question",
        f"{done.shape}, {done.dtype}, {done.device} · {asked.recipe} at {asked.ratio:g} · "
        f"{asked.traffic.chunks_per_query} chunks of {asked.chunk_tokens} tokens each",
        theme,
    )
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    _speed(above, done, theme)
    _sizes(below, done, theme)
    first, second, third = theme.palette[:3]
    legend_below(
        figure,
        [
            (Line2D([], [], color=first, linestyle="none", marker="o", markersize=3), "question"),
            (Line2D([], [], color=first), f"median of {_WINDOW}"),
            (Line2D([], [], color=second, linewidth=3), "median of a quarter"),
            (Line2D([], [], color=third), "stored"),
            (Line2D([], [], color=third, linestyle="--"), "in memory"),
        ],
    )
    return figure


def _speed(axes: Axes, done: SteadyBench, theme: Theme) -> None:
    first, second = theme.palette[:2]
    count = len(done.speedups)
    axes.plot(
        range(count), done.speedups, color=first, linestyle="none", marker="o", markersize=2.5, alpha=0.5
    )
    half = _WINDOW // 2
    running = [statistics.median(done.speedups[max(0, at - half) : at + half + 1]) for at in range(count)]
    axes.plot(range(count), running, color=first)
    for part, median in enumerate(done.quarters):
        axes.hlines(median, part * count / 4, (part + 1) * count / 4, color=second, linewidth=3, alpha=0.7)
    for start in done.started_at[1:]:  # memory was empty again
        axes.axvline(start, color=theme.soft, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times full prefill's speed")


def _sizes(axes: Axes, done: SteadyBench, theme: Theme) -> None:
    color = theme.palette[2]
    axes.plot([row.stored_bytes / 1e9 for row in done.rows], color=color)
    axes.plot([row.host_bytes / 1e9 for row in done.rows], color=color, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB")
    axes.set_xlabel("question")
