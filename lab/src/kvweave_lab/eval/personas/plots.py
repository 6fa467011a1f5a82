"""Figures of the comparison: systems in both tables, ablations, sweeps, and the scheduler question by question."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from kvweave_lab.eval.personas.comparison import Comparison
from kvweave_lab.eval.personas.pricing import TABLES
from kvweave_lab.eval.personas.summary import SystemRow
from kvweave_lab.eval.personas.trials import CHUNKS, STRIDES, THRESHOLDS
from kvweave_lab.eval.report.sheet import legend_below, png, sheet, sign
from kvweave_lab.eval.report.style import LIGHT, Dashes, Look, looks, settings

_SWEEPS: Final[dict[str, tuple[str, Sequence[float]]]] = {
    "stride": ("questions predicted at once", STRIDES),
    "threshold": ("threshold τ", THRESHOLDS),
    "storage": ("storage limit, chunks", CHUNKS),
}
_MEASURES: Final[dict[str, Callable[[SystemRow], float | None]]] = {
    "mean latency, s": lambda row: row.mean_s.value,
    "QA hit rate": lambda row: row.qa_hit.value,
    "KV hit rate": lambda row: row.kv_hit.value,
    "ROUGE-L": lambda row: row.rouge_l.value,
    "BLEU": lambda row: None if row.bleu is None else row.bleu.value,
}
_DASHES: Final[tuple[Dashes, ...]] = ("-", "--", ":")
"""Of lines in the order in which they are drawn: where they coincide, one shows through the next."""


def figures(done: Comparison) -> dict[str, bytes]:
    """PNG files by name; those of further experiments only where there were any."""
    with matplotlib.rc_context(settings(LIGHT)):
        made = {"personas.png": _systems(done)}
        ablations = [row for row in done.further if row.experiment == "ablation" and row.table == "B"]
        if ablations:
            made["personas-ablation.png"] = _ablations(ablations)
        for name in _SWEEPS:
            rows = [row for row in done.further if row.experiment == name and row.table == "B"]
            if rows:
                made[f"personas-{name}.png"] = _sweep(name, rows)
        if done.scheduler:
            made["personas-scheduler.png"] = _scheduler(done)
    return made


def _systems(done: Comparison) -> bytes:
    figure = sheet(
        9.0,
        3.6,
        "Mean latency of a question",
        f"{done.about['users']} users, {done.about['questions']} questions · left: projection reuse (A),"
        " right: ordinary reuse (B) · lines: 95 % interval",
        LIGHT,
    )
    for axes, table in zip(figure.subplots(1, 2, sharey=True, sharex=True), TABLES, strict=True):
        rows = [row for row in done.systems if row.table == table][::-1]
        means = [row.mean_s.value for row in rows]
        spans = [
            [row.mean_s.value - row.mean_s.low for row in rows],
            [row.mean_s.high - row.mean_s.value for row in rows],
        ]
        axes.barh([row.trial for row in rows], means, xerr=spans, color=LIGHT.palette[0], ecolor=LIGHT.ink)
        axes.set_xlabel(f"{table}: seconds")
    return png(figure)


def _ablations(rows: Sequence[SystemRow]) -> bytes:
    """PerCache and kvweave less one part each, as in PerCache's Figure 16."""
    shown = {name: _MEASURES[name] for name in ("mean latency, s", "QA hit rate", "KV hit rate")}
    figure = sheet(11.0, 4.6, "Less one part each", f"users: {rows[0].users} · ordinary reuse (B)", LIGHT)
    panels = figure.subplots(1, len(shown), sharey=True)
    for axes, (measure, of) in zip(panels, shown.items(), strict=True):
        axes.barh([row.trial for row in rows][::-1], [of(row) for row in rows][::-1], color=LIGHT.palette[0])
        axes.set_xlabel(measure)
    return png(figure)


def _sweep(name: str, rows: Sequence[SystemRow]) -> bytes:
    label, places = _SWEEPS[name]
    systems = list(dict.fromkeys(row.trial.rpartition(" ")[0] for row in rows))
    chosen = _apart(systems)
    measures = {said: of for said, of in _MEASURES.items() if all(of(row) is not None for row in rows)}
    figure = sheet(11.0, 2.9, f"By {label}", f"users: {rows[0].users} · ordinary reuse (B)", LIGHT)
    for axes, (measure, of) in zip(figure.subplots(1, len(measures)), measures.items(), strict=True):
        for system in systems:
            values = [of(row) for row in rows if row.trial.rpartition(" ")[0] == system]
            look = chosen[system]
            axes.plot(places, values, color=look.color, marker=look.marker, linestyle=look.dashes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        axes.set_xlabel(label)
        axes.set_ylabel(measure)
    legend_below(figure, [(sign(chosen[system], LIGHT, line=True), system) for system in systems])
    return png(figure)


def _scheduler(done: Comparison) -> bytes:
    names = list(dict.fromkeys(row.trial.rpartition(", ")[0] for row in done.scheduler))
    chosen = _apart(["with", "without"])
    figure = sheet(9.6, 4.6, "The scheduler, question by question", "projection reuse (A)", LIGHT)
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        for row in done.scheduler:
            experiment, _, said = row.trial.rpartition(", ")
            if experiment == name:
                look = chosen[said]
                _line(grid[0][column], [flops / 1e12 for flops in row.idle_flops], look.color, look.dashes)
                _line(grid[1][column], row.latency_s, look.color, look.dashes)
        grid[0][column].set_title(name)
        for axes in grid[:, column]:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        grid[1][column].set_xlabel("question")
    grid[0][0].set_ylabel("idle TFLOP so far")
    grid[1][0].set_ylabel("latency, s")
    legend_below(
        figure,
        [(sign(look, LIGHT, line=True), f"{said} the scheduler") for said, look in chosen.items()],
    )
    return png(figure)


def _apart(names: Sequence[str]) -> Mapping[str, Look]:
    """A look for each line of a figure."""
    chosen = looks(names, LIGHT)
    return {name: replace(chosen[name], dashes=_DASHES[place]) for place, name in enumerate(names)}


def _line(axes: Axes, values: Sequence[float], color: str, dashes: str) -> None:
    axes.plot(range(len(values)), values, color=color, linestyle=dashes, linewidth=1.5)
