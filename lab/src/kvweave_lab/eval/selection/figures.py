"""A selection report on disk: everything as JSON, and its figures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvweave.results import facts
from kvweave_lab.eval.selection.measure import DEPTHS
from kvweave_lab.eval.selection.report import SelectionReport
from kvweave_lab.report import json_bytes, write_files
from kvweave_lab.report.figures import (
    LIGHT,
    Theme,
    add_series_legend,
    new_figure,
    plot_estimates,
    reference_line,
    render,
    shades,
    styles_of,
)
from kvweave_lab.statistics import Estimate

Series = Mapping[str, Sequence[Estimate]]

_DRAWN: Final = (
    "question_stale",
    "question_stale_last",
    "question_full",
    "optimal",
    "deviation",
    "position",
    "random",
)
"""The selections in figures with a line per selection; tables have them all."""


def write_reports(folder: Path, reports: Mapping[str, SelectionReport]) -> list[Path]:
    """Write one report's files, or several reports' in a folder each and the comparison of all."""
    if len(reports) == 1:
        return write_selection(folder, next(iter(reports.values())))
    files = [
        path
        for name, report in reports.items()
        for path in write_selection(folder / name.replace(" ", "-"), report)
    ]
    return [*files, *write_sweep(folder, reports)]


def write_selection(folder: Path, report: SelectionReport) -> list[Path]:
    """Write `selection.json` and a PNG for every figure, replacing the files of an earlier report.

    Creates the folder and returns the files. Raises InvalidRequest if the folder cannot be written to.
    """
    figures = {f"{name}.png": image for name, image in pictures(report).items()}
    return write_files(
        folder, {"selection.json": json_bytes(facts(report), allow_nan=False), **figures}, _FILES.__contains__
    )


def write_sweep(folder: Path, reports: Mapping[str, SelectionReport]) -> list[Path]:
    """Write the comparison of reports, `sweep.json` with all of them and `sweep.png`; else as `write_selection`."""
    contents = {
        "sweep.json": json_bytes(facts(dict(reports)), allow_nan=False),
        "sweep.png": sweep_picture(reports),
    }
    return write_files(folder, contents, _FILES.__contains__)


def pictures(report: SelectionReport) -> Mapping[str, bytes]:
    """Return every figure as PNG, by the name of its file without the suffix."""

    def drawn(draw: Callable[[SelectionReport], Figure]) -> bytes:
        return render(lambda _: draw(report), LIGHT)

    return {
        name: drawn(draw)
        for name, draw in _FIGURES.items()
        if report.answers is not None or draw is not _answers
    }


def sweep_picture(reports: Mapping[str, SelectionReport]) -> bytes:
    """Return how well selections find the decode-attended tokens, report by report, as PNG."""
    first = next(iter(reports.values()))

    def draw(_: Theme) -> Figure:
        decoding = first.selections.index("decoding")
        series = {
            name: [
                report.preparations[0].overlap[first.selections.index(name)][decoding]
                for report in reports.values()
            ]
            for name in _DRAWN
        }
        title = f"Decode-attended tokens selected, top {first.ratio:.0%}"
        figure, axes = _one_panel(title, f"{first.model} · bands: 95 % interval")
        _lines(figure, axes, series, range(len(reports)))
        axes.set_xticks(range(len(reports)), list(reports))
        axes.set_ylabel("share")
        return figure

    return render(draw, LIGHT)


def _overlap(report: SelectionReport) -> Figure:
    """Selections × selections."""
    names = report.selections
    values = [[cell.value for cell in row] for row in report.preparations[0].overlap]
    figure = new_figure(7.6, 6.2, f"Tokens in common, top {report.ratio:.0%}", _about(report), LIGHT)
    axes = figure.subplots()
    axes.imshow(values, cmap=shades(LIGHT), vmin=0, vmax=1)
    axes.grid(visible=False)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            color = LIGHT.ground if value > 0.6 else LIGHT.ink
            axes.text(j, i, f"{value:.2f}".lstrip("0"), ha="center", va="center", size=7.5, color=color)
    return figure


def _by_ratio(report: SelectionReport) -> Figure:
    """ProphetKV fig. 3 and 4."""
    first = report.preparations[0]
    figure, axes = _one_panel("Decode-attended tokens selected", f"{_about(report)} · bands: 95 % interval")
    _lines(figure, axes, _rows(report, first.by_ratio), report.ratios)
    axes.set_xlabel("share of the context selected")
    axes.set_ylabel("share of the decode-attended tokens")
    axes.set_ylim(-0.02, 1.03)
    return figure


def _loss(report: SelectionReport) -> Figure:
    """ProphetKV fig. 6."""
    first = report.preparations[0]
    figure, axes = _one_panel(
        "Loss left when each layer's tokens are ranked by one factor",
        f"{_about(report)} · bands: 95 % interval",
    )
    _lines(figure, axes, dict(zip(report.factors, first.factor_loss, strict=True)), report.ratios)
    axes.set_xlabel("share of the context selected")
    axes.set_ylabel("share of the loss left")
    axes.set_ylim(-0.02, 1.03)
    return figure


def _optimal(report: SelectionReport) -> Figure:
    """ProphetKV fig. 7, layer by layer."""
    first = report.preparations[0]
    layers = range(2, 2 + len(first.with_optimal[0]))
    title = f"Each layer's optimal tokens selected, top {report.ratio:.0%}"
    figure, axes = _one_panel(title, f"{_about(report)} · bands: 95 % interval")
    _lines(figure, axes, _rows(report, first.with_optimal), layers)
    axes.set_xticks(layers)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of the layer's optimal tokens")
    return figure


def _layers(report: SelectionReport) -> Figure:
    """Which layers foresee decoding, task by task."""
    stale = report.layer_curves.index("stale")
    series = {task.task: task.curves[stale] for task in report.preparations[0].layers}
    title = f"Decode-attended tokens found by one layer's question rows, top {report.ratio:.0%}"
    figure, axes = _one_panel(title, _about(report))
    _lines(figure, axes, series, range(1, 1 + len(series["overall"])), bands=len(series) == 1)
    axes.set_xlabel("layer")
    axes.set_ylabel("share of the decode-attended tokens")
    return figure


def _deviation(report: SelectionReport) -> Figure:
    """FusionRAG fig. 7b, layer by layer and by place in the chunk (fig. 3b)."""
    names = [preparation.name for preparation in report.preparations]
    figure = new_figure(
        8.8,
        3.4,
        "KV deviation from full attention",
        f"{_about(report, prepared=False)} · bands: 95 % interval",
        LIGHT,
    )
    by_layer, by_depth = figure.subplots(1, 2)
    styles = styles_of(names, LIGHT)
    for preparation in report.preparations:
        found, style = preparation.deviation, styles[preparation.name]
        plot_estimates(by_layer, range(1, 1 + len(found.relative)), found.relative, style, LIGHT)
        against_mean = [
            Estimate(share.value * DEPTHS, share.low * DEPTHS, share.high * DEPTHS) for share in found.depths
        ]
        plot_estimates(by_depth, range(1, DEPTHS + 1), against_mean, style, LIGHT)
    by_layer.set_title("by layer, share of the squared length")
    by_layer.set_xlabel("layer")
    by_depth.set_title("second layer, against the chunk's mean")
    by_depth.set_xlabel("tenth of the chunk")
    by_depth.set_xticks(range(1, 1 + DEPTHS))
    by_depth.set_ylim(bottom=0)
    add_series_legend(figure, styles, LIGHT)
    return figure


def _places(report: SelectionReport) -> Figure:
    """FusionRAG fig. 8."""
    first = report.preparations[0]
    title = f"Where the top {report.ratio:.0%} tokens lie"
    figure = new_figure(8.8, 3.4, title, f"{_about(report)} · bands: 95 % interval", LIGHT)
    by_depth, by_chunk = figure.subplots(1, 2)
    styles = styles_of(_DRAWN, LIGHT)
    for name in _DRAWN:
        number, style = report.selections.index(name), styles[name]
        for axes, shares in ((by_depth, first.depths[number]), (by_chunk, first.chunks[number])):
            plot_estimates(axes, range(1, 1 + len(shares)), shares, style, LIGHT)
    for axes, label, count in (
        (by_depth, "tenth of the chunk", DEPTHS),
        (by_chunk, "chunk", len(first.chunks[0])),
    ):
        axes.set_xlabel(label)
        axes.set_xticks(range(1, 1 + count))
        axes.set_ylim(bottom=0)
    by_depth.set_ylabel("share of the selected tokens")
    add_series_legend(figure, styles, LIGHT)
    return figure


def _answers(report: SelectionReport) -> Figure:
    """ProphetKV fig. 9."""
    found = report.answers
    assert found is not None
    figure, axes = _one_panel(
        "Score after recomputing idealised selections",
        f"{_about(report)} · dashed: full attention · bands: 95 % interval",
    )
    axes.axhline(found.full_score.value, **reference_line(LIGHT))
    series = {
        name: (found.stale_score, *row) for name, row in zip(found.selections, found.score, strict=True)
    }
    _lines(figure, axes, series, (0.0, *found.ratios))
    axes.set_xlabel("share of the stale context recomputed")
    axes.set_ylabel("score")
    return figure


def _one_panel(title: str, note: str) -> tuple[Figure, Axes]:
    figure = new_figure(7.2, 4.4, title, note, LIGHT)
    return figure, figure.subplots()


def _lines(
    figure: Figure, axes: Axes, series: Series, places: Sequence[float], *, bands: bool = True
) -> None:
    styles = styles_of(list(series), LIGHT)
    for name, row in series.items():
        plot_estimates(axes, places, row, styles[name], LIGHT, band_alpha=0.12 if bands else 0)
    add_series_legend(figure, styles, LIGHT)


def _rows(report: SelectionReport, values: Sequence[Sequence[Estimate]]) -> Series:
    return {name: values[report.selections.index(name)] for name in _DRAWN}


def _about(report: SelectionReport, *, prepared: bool = True) -> str:
    over = f" · over {report.preparations[0].name} KV" if prepared else ""
    return (
        f"{report.model} · {report.samples} prompts · {report.context_tokens:,.0f} tokens of context in chunks of"
        f" {report.chunk_tokens:.0f}{over}"
    )


_FIGURES: Mapping[str, Callable[[SelectionReport], Figure]] = MappingProxyType(
    {
        "overlap": _overlap,
        "decoding-by-ratio": _by_ratio,
        "loss-by-factor": _loss,
        "optimal-by-layer": _optimal,
        "decoding-by-layer": _layers,
        "kv-deviation": _deviation,
        "places": _places,
        "answers-by-ratio": _answers,
    }
)

PICTURES: Final = tuple(_FIGURES)
"""The names of all figures that a report can have."""

_FILES: Final = frozenset(
    ("selection.json", *(f"{name}.png" for name in PICTURES), "sweep.json", "sweep.png")
)
"""What an earlier report may have left in the folder; it would look like a part of this one."""
