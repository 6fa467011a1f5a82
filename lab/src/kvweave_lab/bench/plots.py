"""Figures of `kvweave bench ttft` (time to first token by ratio) and `kvweave bench steady` (speed-up by question)."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.bench.steady import SteadyBench
from kvweave_lab.bench.ttft import TtftBench, TtftRange, TtftRow
from kvweave_lab.report.figures import (
    LIGHT,
    SeriesStyle,
    Theme,
    add_legend,
    legend_handle,
    line_properties,
    new_figure,
    reference_line,
    render,
    series_styles,
)

_PANEL_IN = (4.4, 3.3)
_LEGEND_IN = 0.6
_HEADING_IN = 5.9  # wide


def ttft_plot(done: TtftBench, theme: Theme = LIGHT) -> bytes:
    """Draw time to first token by ratio as PNG: a panel per context, each recipe with its limit.

    Bands are the smallest and the largest time of all rounds.
    """
    return render(lambda theme: _ttft_figure(done, theme), theme)


def _ttft_figure(done: TtftBench, theme: Theme) -> Figure:
    contexts = list(dict.fromkeys(row.context_tokens for row in done.rows))
    styles = series_styles(list(dict.fromkeys(map(_series, done.rows))), theme)
    first = done.rows[0]
    figure = new_figure(
        max(_PANEL_IN[0] * len(contexts), _HEADING_IN),
        _PANEL_IN[1] + _LEGEND_IN,
        "Time to first token by share of stale tokens recomputed",
        f"{first.shape}, {first.dtype}, {first.device}, {first.threads} threads · "
        f"bands: all {done.settings.rounds} rounds",
        theme,
    )
    for place, context_tokens in enumerate(contexts):
        axes = figure.add_subplot(1, len(contexts), place + 1)
        _draw_panel(axes, done, context_tokens, styles, theme)
        axes.set_title(f"{context_tokens:,} tokens")
        axes.set_xlabel("ratio")
        axes.set_ylabel("seconds" if place == 0 else "")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    add_legend(figure, _ttft_legend(done.rows, styles, theme))
    return figure


def _draw_panel(
    axes: Axes, done: TtftBench, context_tokens: int, styles: Mapping[str, SeriesStyle], theme: Theme
) -> None:
    pairs = [
        pair for pair in zip(done.rows, done.spreads, strict=True) if pair[0].context_tokens == context_tokens
    ]
    axes.axhline(pairs[0][0].full_s, **reference_line(theme))
    for series in dict.fromkeys(_series(row) for row, _ in pairs):
        own = sorted((pair for pair in pairs if _series(pair[0]) == series), key=lambda pair: pair[0].ratio)
        _draw_series(axes, own, styles[series], theme)


def _series(row: TtftRow) -> str:
    return row.recipe if row.kv_from == "memory" else f"{row.recipe}, from disk"


def _draw_series(
    axes: Axes, own: Sequence[tuple[TtftRow, TtftRange]], style: SeriesStyle, theme: Theme
) -> None:
    at = [row.ratio for row, _ in own]
    low, high = [ranges.ttft_s.low for _, ranges in own], [ranges.ttft_s.high for _, ranges in own]
    axes.fill_between(at, low, high, color=style.color, alpha=0.15, linewidth=0)
    axes.plot(at, [row.ttft_s for row, _ in own], **line_properties(style, theme))
    limits = [row.full_s / row.limit_speedup for row, _ in own]
    axes.plot(at, limits, color=style.color, linestyle=":", linewidth=1.2)


def _ttft_legend(
    rows: Sequence[TtftRow], styles: Mapping[str, SeriesStyle], theme: Theme
) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], **reference_line(theme)), "full prefill"),
        (Line2D([], [], color=theme.soft, linestyle=":", linewidth=1.2), "limit"),
    ]
    return entries + [
        (legend_handle(styles[name], theme, line=True), name) for name in dict.fromkeys(map(_series, rows))
    ]


_SIZE_IN = (8.0, 5.2)
_WINDOW = 21
"""Questions in the running median."""


def steady_plot(done: SteadyBench, theme: Theme = LIGHT) -> bytes:
    """Draw speed-up by question as PNG, and below it how much is stored and how much is in memory.

    A dot is a question. A line is their running median, a bar the median of a quarter.
    """
    return render(lambda theme: _steady_figure(done, theme), theme)


def _steady_figure(done: SteadyBench, theme: Theme) -> Figure:
    asked = done.settings
    figure = new_figure(
        *_SIZE_IN,
        "Speed-up to the first token, question by question",
        f"{done.shape}, {done.dtype}, {done.device} · {asked.recipe} at {asked.ratio:g} · "
        f"{asked.traffic.chunks_per_query} chunks of {asked.chunk_tokens} tokens each",
        theme,
    )
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    _draw_speedups(above, done, theme)
    _draw_sizes(below, done, theme)
    first, second, third = theme.palette[:3]
    add_legend(
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


def _draw_speedups(axes: Axes, done: SteadyBench, theme: Theme) -> None:
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
    for start in done.started_at[1:]:  # a new process, with an empty host tier
        axes.axvline(start, color=theme.soft, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times full prefill's speed")


def _draw_sizes(axes: Axes, done: SteadyBench, theme: Theme) -> None:
    color = theme.palette[2]
    axes.plot([row.stored_bytes / 1e9 for row in done.rows], color=color)
    axes.plot([row.host_bytes / 1e9 for row in done.rows], color=color, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB")
    axes.set_xlabel("question")
