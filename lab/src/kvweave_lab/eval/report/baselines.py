"""Score per task without any choice of tokens: full attention, reuse, direct and naive reuse as bars."""

from collections.abc import Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvweave_lab.eval.report import slices
from kvweave_lab.eval.report.sheet import QUARTERS, legend_below, sheet
from kvweave_lab.eval.report.style import BASELINES, Look, Theme
from kvweave_lab.eval.results import FULL, REUSE, Estimate, Row
from kvweave_lab.eval.summary import OVERALL

_BAR_IN = 0.12
_GROUP_IN = 0.17  # between two tasks


def baselines(rows: Sequence[Row], looks: Mapping[str, Look], theme: Theme) -> Figure:
    """Rows of one length; a recipe that was not run has no bar."""
    names = slices.panels(rows)
    found = [(name, _baselines_of(slices.of_task(rows, name))) for name in names]
    shown = [recipe for recipe in reversed(BASELINES) if any(recipe in scores for _, scores in found)]
    group_in = len(shown) * _BAR_IN + _GROUP_IN
    figure = sheet(
        6.6,
        len(names) * group_in + 0.9,
        "Full attention and plain reuse",
        f"{slices.length_named(rows[0].context_tokens)} · lines: 95 % interval",
        theme,
    )
    axes = figure.subplots()
    thick = _BAR_IN / group_in
    for place, (_, scores) in enumerate(found):
        for number, recipe in enumerate(shown):
            if recipe in scores:
                y = place + (number - (len(shown) - 1) / 2) * thick
                _bar(axes, y, thick, scores[recipe], looks[recipe].color, theme)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for label in axes.set_yticks(range(len(names)), names, color=theme.ink, size=9):
        label.label1.set_fontweight("bold" if label.label1.get_text() == OVERALL else "normal")
    axes.set_xticks(list(QUARTERS), list(QUARTERS.values()))
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("score")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    legend_below(figure, _legend(shown, looks))
    return figure


def _baselines_of(rows: Sequence[Row]) -> dict[str, Estimate]:
    """By recipe; naive and direct as they are without recomputing."""
    scores = {FULL: rows[0].full_score, REUSE: rows[0].reuse_score}
    plain = {row.recipe: row.score for row in rows if row.recipe in BASELINES and row.ratio == 0}
    return plain | scores


def _bar(axes: Axes, y: float, thick: float, score: Estimate, color: str, theme: Theme) -> None:
    axes.barh(y, score.value, height=thick * 0.84, color=color, linewidth=0)
    for start, end, shade in ((score.low, score.value, theme.ground), (score.value, score.high, color)):
        axes.plot([start, end], [y, y], color=shade, linewidth=1.3, solid_capstyle="butt", zorder=3)


def _legend(shown: Sequence[str], looks: Mapping[str, Look]) -> list[tuple[Artist, str]]:
    said = {
        "full": "full attention",
        "reuse": "reuse (behind the system prefix)",
        "direct": "direct (alone, positions moved)",
        "naive": "naive (alone, positions as stored)",
    }
    return [(Patch(color=looks[recipe].color, linewidth=0), said[recipe]) for recipe in shown]
