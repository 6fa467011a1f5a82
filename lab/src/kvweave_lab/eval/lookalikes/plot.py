"""Hit rate against false-hit rate, a curve per matcher, in the looks that all of evaluation shares."""

from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from kvweave_lab.eval.lookalikes.matchers import MATCHERS
from kvweave_lab.eval.lookalikes.measure import Lookalikes, MatcherRow
from kvweave_lab.eval.report.sheet import legend_below, png, sheet, sign
from kvweave_lab.eval.report.style import LIGHT, Look, looks, settings

_TARGET: Final = 0.001
"""False hits that a bank which people leave on may have."""


def curve(done: Lookalikes) -> bytes:
    """The figure as PNG. A rate of 0 stands at half of what one look-alike would be: no logarithm shows it."""
    names = [matcher.name for matcher in MATCHERS]
    with matplotlib.rc_context(settings(LIGHT)):
        figure = sheet(
            7.2,
            4.4,
            "Paraphrases that hit, by look-alikes that hit",
            f"{done.embedding} · {done.paraphrases:,} paraphrases, {done.lookalikes:,} look-alikes, {done.split} ·"
            " large: threshold as it comes",
            LIGHT,
        )
        axes = figure.subplots()
        chosen = looks(names, LIGHT)
        floor = 0.5 / done.lookalikes
        for name in names:
            _line(axes, [row for row in done.rows if row.matcher == name], chosen[name], floor)
        if floor < _TARGET:
            axes.axvline(_TARGET, color=LIGHT.soft, linestyle=":", linewidth=1)
        _axes(axes, floor)
        legend_below(figure, [(sign(chosen[name], LIGHT, line=True), name) for name in names])
        return png(figure)


def _line(axes: Axes, rows: list[MatcherRow], look: Look, floor: float) -> None:
    at = [(max(row.false_hit_rate.value, floor), row.hit_rate.value) for row in rows]
    axes.plot(*zip(*at, strict=True), color=look.color, linestyle=look.dashes, linewidth=1.5)
    (default,) = [place for place, row in zip(at, rows, strict=True) if row.is_default]
    axes.plot(*default, color=look.color, marker=look.marker, markersize=9, linestyle="none", zorder=3)


def _axes(axes: Axes, floor: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(floor * 0.8, 1.1)
    axes.set_ylim(-0.02, 1.03)
    axes.set_xlabel("look-alikes that are given the wrong answer")
    axes.set_ylabel("paraphrases that are given the answer")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    shares = {10.0**power: f"{10.0 ** (power + 2):g} %" for power in range(-4, 1)}
    ticks = {floor: "0"} | {share: name for share, name in shares.items() if share > 2 * floor}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
