"""The figure of an evaluation by budget: what is kept of answers against time to the first token, one line per recipe."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from matplotlib.figure import Figure

from kvweave_lab.eval.outcomes import FULL
from kvweave_lab.report.figures import (
    LIGHT,
    Theme,
    add_series_legend,
    line_properties,
    new_figure,
    reference_line,
    render,
    styles_of,
)

_PANEL_IN: Final = (4.8, 3.6)
_LEGEND_IN: Final = 0.8
_HEADING_IN: Final = 6.4  # wide


def kept_plot(model: str, runs: Sequence[Mapping[str, Any]], theme: Theme = LIGHT) -> bytes:
    """Draw runs of one model, each the content of a natural.json with answers, as PNG: a panel per length of context."""
    return render(lambda theme: _kept_figure(model, runs, theme), theme)


def _kept_figure(model: str, runs: Sequence[Mapping[str, Any]], theme: Theme) -> Figure:
    panels: dict[int, list[Mapping[str, Any]]] = {}
    for row in (row for run in runs for row in run["rows"]):
        if row["recipe"] != FULL and row["ratio"] is not None:
            panels.setdefault(row["context_tokens"], []).append(row)
    styles = styles_of(list(dict.fromkeys(row["recipe"] for rows in panels.values() for row in rows)), theme)
    about = runs[0]["about"]
    figure = new_figure(
        max(_PANEL_IN[0] * len(panels), _HEADING_IN),
        _PANEL_IN[1] + _LEGEND_IN,
        f"{model}: what is kept of answers, against time",
        f"{about['dtype']}, {about['threads']} threads · along a line the ratio grows",
        theme,
    )
    for place, (length, rows) in enumerate(sorted(panels.items()), 1):
        axes = figure.add_subplot(1, len(panels), place)
        for name in dict.fromkeys(row["recipe"] for row in rows):
            points = sorted(
                (row["ratio"], row["time"], row["agreed"]) for row in rows if row["recipe"] == name
            )
            axes.plot(
                [time for _, time, _ in points],
                [kept for _, _, kept in points],
                **line_properties(styles[name], theme),
            )
        axes.axvline(1, **reference_line(theme))
        axes.set_title(f"{length:,} tokens")
        axes.set_xlabel("time to first token, of a full prefill")
        axes.set_ylabel("tokens of full attention's answers" if place == 1 else "")
        axes.set_xlim(left=0)
        axes.set_ylim(top=1.005)
    add_series_legend(figure, styles, theme)
    return figure
