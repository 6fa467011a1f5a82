"""Time to first token against ratio, one panel per context, each recipe beside its limit."""

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvweave_lab.bench.ttft_results import TtftBench, TtftRow, TtftSpread
from kvweave_lab.eval.report.sheet import full_line, legend_below, png, sheet, sign
from kvweave_lab.eval.report.style import LIGHT, Look, Theme, looks, settings

_PANEL_IN = (4.4, 3.3)
_LEGEND_IN = 0.6
_HEADING_IN = 5.9  # wide


def ttft_plot(done: TtftBench, theme: Theme = LIGHT) -> bytes:
    """PNG; bands are the smallest and the largest of all rounds."""
    with matplotlib.rc_context(settings(theme)):
        return png(_drawn(done, theme))


def _drawn(done: TtftBench, theme: Theme) -> Figure:
    contexts = list(dict.fromkeys(row.context_tokens for row in done.rows))
    chosen = looks(list(dict.fromkeys(map(_series, done.rows))), theme)
    first = done.rows[0]
    figure = sheet(
        max(_PANEL_IN[0] * len(contexts), _HEADING_IN),
        _PANEL_IN[1] + _LEGEND_IN,
        "Time to first token by share of stale tokens recomputed",
        f"{first.shape}, {first.dtype}, {first.device}, {first.threads} threads · "
        f"bands: all {done.settings.rounds} rounds",
        theme,
    )
    for place, context_tokens in enumerate(contexts):
        axes = figure.add_subplot(1, len(contexts), place + 1)
        _panel(axes, done, context_tokens, chosen, theme)
        axes.set_title(f"{context_tokens:,} tokens")
        axes.set_xlabel("ratio")
        axes.set_ylabel("seconds" if place == 0 else "")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    legend_below(figure, _legend(done.rows, chosen, theme))
    return figure


def _panel(
    axes: Axes, done: TtftBench, context_tokens: int, chosen: Mapping[str, Look], theme: Theme
) -> None:
    pairs = [
        pair for pair in zip(done.rows, done.spreads, strict=True) if pair[0].context_tokens == context_tokens
    ]
    axes.axhline(pairs[0][0].full_s, **full_line(theme))
    for series in dict.fromkeys(_series(row) for row, _ in pairs):
        own = sorted((pair for pair in pairs if _series(pair[0]) == series), key=lambda pair: pair[0].ratio)
        _line(axes, own, chosen[series], theme)


def _series(row: TtftRow) -> str:
    return row.recipe if row.kv_from == "memory" else f"{row.recipe}, from disk"


def _line(axes: Axes, own: Sequence[tuple[TtftRow, TtftSpread]], look: Look, theme: Theme) -> None:
    at = [row.ratio for row, _ in own]
    low, high = [spread.ttft_s.low for _, spread in own], [spread.ttft_s.high for _, spread in own]
    axes.fill_between(at, low, high, color=look.color, alpha=0.15, linewidth=0)
    axes.plot(
        at,
        [row.ttft_s for row, _ in own],
        color=look.color,
        linestyle=look.dashes,
        marker=look.marker,
        markerfacecolor=look.color if look.filled else theme.ground,
    )
    axes.plot(
        at, [row.full_s / row.limit_speedup for row, _ in own], color=look.color, linestyle=":", linewidth=1.2
    )


def _legend(rows: Sequence[TtftRow], chosen: Mapping[str, Look], theme: Theme) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], **full_line(theme)), "full prefill"),
        (Line2D([], [], color=theme.soft, linestyle=":", linewidth=1.2), "limit"),
    ]
    return entries + [
        (sign(chosen[name], theme, line=True), name) for name in dict.fromkeys(map(_series, rows))
    ]
