"""The comparison of systems as terminal tables, JSON and figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table as TextTable

from kvweave_lab.eval.personas.execute import ExecutedRow
from kvweave_lab.eval.personas.pricing import Decoding, Table
from kvweave_lab.eval.personas.run import Comparison
from kvweave_lab.eval.personas.summary import PairRow, SystemRow, savings
from kvweave_lab.eval.personas.systems import CHUNKS, STRIDES, THRESHOLDS, Answers
from kvweave_lab.report import interval_text, json_bytes, text_table, write_files
from kvweave_lab.report.figures import (
    LineStyle,
    SeriesStyle,
    Theme,
    add_legend,
    add_series_legend,
    legend_handle,
    new_figure,
    render,
    styles_of,
)

_JSON: Final = "personas.json"
WAYS: Final[dict[Decoding, str]] = {"token": "token by token", "lookup": "prompt lookup"}
_TITLES: Final[dict[Table, str]] = {
    "A": "A · projection reuse, as PerCache replays it",
    "B": "B · ordinary reuse: stored tokens are not computed",
}


def content(done: Comparison, environment: dict[str, Any]) -> dict[str, Any]:
    """Return the results as JSON values, with the environment of the measurement.

    Estimates have the keys value, low and high.
    """
    return {
        "about": {**environment, **done.about},
        "costs": asdict(done.costs),
        "systems": [asdict(row) for row in done.systems],
        "pairs": [asdict(row) for row in done.pairs],
        "users": [asdict(row) for row in done.users],
        "further": [asdict(row) for row in done.further],
        "scheduler": [asdict(row) for row in done.scheduler],
        "scheduler savings": [asdict(saving) for saving in savings(done.scheduler)],
        "operations": [asdict(row) for row in done.operations],
        "executed": [asdict(row) for row in done.executed],
    }


def write(folder: Path, done: Comparison, environment: dict[str, Any]) -> list[Path]:
    """Write personas.json and the figures; raise InvalidRequest if the folder cannot be written to."""
    return write_files(folder, {_JSON: json_bytes(content(done, environment)), **figures(done)})


def tables(done: Comparison) -> list[TextTable]:
    """Return all tables.

    A and B for each length of replies and way of decoding, pairs of systems, the further experiments, the scheduler,
    operations, and executed requests.
    """
    found = _tables_of("systems", done.systems)
    found += [
        _pair_table(regime, [row for row in done.pairs if (row.answers, row.decoding) == regime])
        for regime in dict.fromkeys((row.answers, row.decoding) for row in done.pairs)
    ]
    for experiment in dict.fromkeys(row.experiment for row in done.further):
        found += _tables_of(experiment, [row for row in done.further if row.experiment == experiment])
    if done.scheduler:
        found.append(_scheduler_table(done))
    found.append(_operation_table(done))
    if done.executed:
        found.append(_executed_table(done.executed))
    return found


def _tables_of(experiment: str, rows: Sequence[SystemRow]) -> list[TextTable]:
    return [
        _system_table(
            f"{experiment} · {answers} answers, {WAYS[decoding]} · {_TITLES[table]}",
            [row for row in rows if (row.answers, row.decoding, row.table) == (answers, decoding, table)],
        )
        for answers, decoding, table in dict.fromkeys((row.answers, row.decoding, row.table) for row in rows)
    ]


def _system_table(title: str, rows: Sequence[SystemRow]) -> TextTable:
    table = text_table(
        ("system", "mean s", "95 %", "QA %", "ahead", "KV %", "ahead", "ROUGE-L", "MB"),
        title=title,
        caption=f"{rows[0].users} users, {rows[0].questions} questions · ahead: the part from predicted questions"
        " · intervals and more: in the JSON",
    )
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(
            row.trial,
            f"{row.mean_s.value:.3f}",
            f"{row.tail_s:.2f}",
            *(f"{100 * rate.value:.1f}" for rate in (row.qa_hit, row.foreseen, row.kv_hit, row.kv_foreseen)),
            f"{row.rouge_l.value:.3f}",
            f"{row.stored_bytes / 1e6:.1f}",
        )
    return table


def _pair_table(regime: tuple[Answers, Decoding], rows: Sequence[PairRow]) -> TextTable:
    table = text_table(
        ("", "system", "than", "faster", "ROUGE-L"),
        names=3,
        title=f"who is faster · {regime[0]} answers, {WAYS[regime[1]]}",
        caption="share of mean latency saved (paired 95 % interval), gain in ROUGE-L",
    )
    for row in rows:
        table.add_row(
            row.table, row.system, row.other, interval_text(row.faster, "+.1%"), f"{row.rouge_l.value:+.3f}"
        )
    return table


def _scheduler_table(done: Comparison) -> TextTable:
    table = text_table(
        ("experiment", "idle operations", "latency"),
        title="the scheduler",
        caption="savings in operations at idle time, and in latency after the change",
    )
    for saving in savings(done.scheduler):
        table.add_row(saving.experiment, f"{saving.idle_flops:+.1%}", f"{saving.latency:+.1%}")
    return table


def _operation_table(done: Comparison) -> TextTable:
    table = text_table(
        ("answers", "what", "ms", "bytes"),
        names=2,
        title="operations and items",
        caption="PerCache's requests, ordinary reuse",
    )
    for row in done.operations:
        table.add_row(
            row.answers,
            row.name,
            "" if row.seconds is None else f"{1e3 * row.seconds:.2f}",
            "" if row.bytes is None else f"{row.bytes:,.0f}",
        )
    return table


def _executed_table(rows: Sequence[ExecutedRow]) -> TextTable:
    table = text_table(
        (
            "answers",
            "decoding",
            "system",
            "executed s",
            "priced s",
            "ratio",
            "load ms",
            "prefill s",
            "decode s",
        ),
        names=3,
        title="executed, beside the prices of the same requests",
        caption=f"{rows[0].users} users, {rows[0].requests} requests of each system; loads from a cold page cache",
    )
    for row in rows:
        table.add_row(
            row.answers,
            WAYS[row.decoding],
            row.system,
            f"{row.executed_s:.3f}",
            f"{row.priced_s:.3f}",
            f"{row.ratio:.2f}",
            f"{1e3 * row.load_s:.1f}",
            f"{row.prefill_s:.3f}",
            f"{row.decode_s:.3f}",
        )
    return table


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
_DASHES: Final[tuple[LineStyle, ...]] = ("-", "--", ":")
"""Line styles in drawing order, so that each line shows through the next where they coincide."""


def figures(done: Comparison) -> dict[str, bytes]:
    """Draw PNG files by name; those of further experiments only if there were any."""
    images = {"personas.png": render(partial(_latency_figure, done))}
    further = [row for row in done.further if row.table == "B" and row.decoding == done.about["decodings"][0]]
    ablations = [row for row in further if row.experiment == "ablation"]
    if ablations:
        images["personas-ablation.png"] = render(partial(_ablation_figure, ablations))
    for name in _SWEEPS:
        rows = [row for row in further if row.experiment == name]
        if rows:
            images[f"personas-{name}.png"] = render(partial(_sweep_figure, name, rows))
    if done.scheduler:
        images["personas-scheduler.png"] = render(partial(_scheduler_figure, done))
    return images


def _latency_figure(done: Comparison, theme: Theme) -> Figure:
    regimes = list(dict.fromkeys((row.answers, row.decoding) for row in done.systems))
    figure = new_figure(
        max(9.0, 3.4 * len(regimes)),
        3.6,
        "Mean latency of a question",
        f"{done.about['users']} users, {done.about['questions']} questions · ordinary reuse (B) · lines: 95 % interval",
        theme,
    )
    panels = figure.subplots(1, len(regimes), sharey=True, squeeze=False)[0]
    for axes, (answers, decoding) in zip(panels, regimes, strict=True):
        rows = [
            row for row in done.systems if (row.answers, row.decoding, row.table) == (answers, decoding, "B")
        ][::-1]
        means = [row.mean_s.value for row in rows]
        spans = [
            [row.mean_s.value - row.mean_s.low for row in rows],
            [row.mean_s.high - row.mean_s.value for row in rows],
        ]
        axes.barh([row.trial for row in rows], means, xerr=spans, color=theme.palette[0], ecolor=theme.ink)
        axes.set_xlabel(f"seconds, {answers} answers, {WAYS[decoding]}")
    return figure


def _ablation_figure(rows: Sequence[SystemRow], theme: Theme) -> Figure:
    """Draw PerCache and kvweave without one part each, as in PerCache's Figure 16."""
    measures = {name: _MEASURES[name] for name in ("mean latency, s", "QA hit rate", "KV hit rate")}
    note = f"users: {rows[0].users} · ordinary reuse (B)"
    figure = new_figure(11.0, 4.6, "Without one part each", note, theme)
    panels = figure.subplots(1, len(measures), sharey=True)
    for axes, (name, value) in zip(panels, measures.items(), strict=True):
        trials, values = [row.trial for row in rows], [value(row) for row in rows]
        axes.barh(trials[::-1], values[::-1], color=theme.palette[0])
        axes.set_xlabel(name)
    return figure


def _sweep_figure(name: str, rows: Sequence[SystemRow], theme: Theme) -> Figure:
    label, places = _SWEEPS[name]
    systems = list(dict.fromkeys(row.trial.rpartition(" ")[0] for row in rows))
    styles = _distinct_styles(systems, theme)
    measures = {
        name: value for name, value in _MEASURES.items() if all(value(row) is not None for row in rows)
    }
    figure = new_figure(11.0, 2.9, f"By {label}", f"users: {rows[0].users} · ordinary reuse (B)", theme)
    for axes, (measure, value) in zip(figure.subplots(1, len(measures)), measures.items(), strict=True):
        for system in systems:
            values = [value(row) for row in rows if row.trial.rpartition(" ")[0] == system]
            style = styles[system]
            axes.plot(places, values, color=style.color, marker=style.marker, linestyle=style.dashes)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        axes.set_xlabel(label)
        axes.set_ylabel(measure)
    add_series_legend(figure, styles, theme)
    return figure


def _scheduler_figure(done: Comparison, theme: Theme) -> Figure:
    names = list(dict.fromkeys(row.trial.rpartition(", ")[0] for row in done.scheduler))
    styles = _distinct_styles(["with", "without"], theme)
    figure = new_figure(9.6, 4.6, "The scheduler, question by question", "projection reuse (A)", theme)
    grid = figure.subplots(2, len(names), squeeze=False)
    for column, name in enumerate(names):
        for row in done.scheduler:
            experiment, _, label = row.trial.rpartition(", ")
            if experiment == name:
                _draw_line(grid[0][column], [flops / 1e12 for flops in row.idle_flops], styles[label])
                _draw_line(grid[1][column], row.latency_s, styles[label])
        grid[0][column].set_title(name)
        for axes in grid[:, column]:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        grid[1][column].set_xlabel("question")
    grid[0][0].set_ylabel("cumulative idle TFLOP")
    grid[1][0].set_ylabel("latency, s")
    handles = {label: legend_handle(style, theme, line=True) for label, style in styles.items()}
    add_legend(figure, [(handle, f"{label} the scheduler") for label, handle in handles.items()])
    return figure


def _distinct_styles(names: Sequence[str], theme: Theme) -> Mapping[str, SeriesStyle]:
    """Return a style for each line of a figure, with distinct dashes."""
    styles = styles_of(names, theme).items()
    return {
        name: replace(style, dashes=dashes) for (name, style), dashes in zip(styles, _DASHES, strict=False)
    }


def _draw_line(axes: Axes, values: Sequence[float], style: SeriesStyle) -> None:
    axes.plot(range(len(values)), values, color=style.color, linestyle=style.dashes, linewidth=1.5)
