"""A selection report as terminal tables: one table for each question that it answers."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from kvweave_lab.eval.selection.measure import DEPTHS, FACTORS, LAYER_CURVES, SELECTIONS
from kvweave_lab.eval.selection.report import (
    AnswersReport,
    AuxiliaryReport,
    Grid,
    PreparationReport,
    SelectionReport,
)
from kvweave_lab.report import half_width, text_table
from kvweave_lab.statistics import Estimate

_WIDEST = "widest ±"
"""The column with half the width of a row's widest interval."""

_SWEPT = ("question_stale", "question_stale_last", "question_full", "deviation", "position", "random")


def tables(report: SelectionReport) -> list[Table]:
    """Return every table of a report: the first preparation in full, the others by their KV deviation."""
    first = report.preparations[0]
    found = [
        _legend(report),
        _matrix("Tokens in common", report, first.overlap),
        _matrix("Jaccard index", report, first.jaccard),
        _by_ratio(report, first),
        _losses(report, first),
        _optimal(report, first),
        _layers(report, first),
        _agreement(report, first),
        _depths(report, first),
        _chunks(report, first),
        *(_deviation(report, preparation) for preparation in report.preparations),
    ]
    if report.answers is not None:
        found.append(_answers(report.answers))
    if report.auxiliary is not None:
        found.append(_auxiliary(report, report.auxiliary))
    return found


def sweep_table(reports: Mapping[str, SelectionReport]) -> Table:
    """Return several reports side by side, a column each: sweeps over chunk size, length, model or split."""
    table = text_table(
        ("", *reports),
        title="Share of the decode-attended tokens selected, by setting",
        caption="± half of the 95 % interval · loss left: by question_stale, nearest ratio · KV deviation: last layer's share of"
        " its squared length",
    )
    lines = [_setting(report) for report in reports.values()]
    for name in lines[0]:
        table.add_row(name, *(line[name] for line in lines))
    return table


def _setting(report: SelectionReport) -> dict[str, str]:
    first, auxiliary = report.preparations[0], report.auxiliary
    decoding = report.selections.index("decoding")
    near = min(range(len(report.ratios)), key=lambda place: abs(report.ratios[place] - report.ratio))
    return {
        "prompts": f"{report.samples}" + (f", {report.left_out} left out" if report.left_out else ""),
        "context tokens": f"{report.context_tokens:.0f}",
        "chunk tokens": f"{report.chunk_tokens:.0f}",
        "ratio": f"{report.ratio:g}",
        **{name: _pm(first.overlap[report.selections.index(name)][decoding]) for name in _SWEPT},
        "loss left": _pm(first.selection_loss[report.selections.index("question_stale")][near]),
        "KV deviation": _pm(first.deviation.relative[-1]),
        "auxiliary's KL": "–" if auxiliary is None else _pm(auxiliary.kl),
        "first layer's KL": "–" if auxiliary is None else _pm(auxiliary.own_kl),
        "KL, difference": "–" if auxiliary is None else _pm(auxiliary.kl_difference),
    }


def _legend(report: SelectionReport) -> Table:
    table = text_table(("", ""), title="What each selection ranks tokens by")
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for name in report.selections:
        table.add_row(name, SELECTIONS[name])
    return table


def _matrix(title: str, report: SelectionReport, values: Grid) -> Table:
    table = text_table(
        ("", *(f"{n}" for n, _ in enumerate(report.selections, 1))), title=f"{title}, top {report.ratio:.0%}"
    )
    for number, (name, row) in enumerate(zip(report.selections, values, strict=True), 1):
        table.add_row(f"{number} {name}", *(_short(cell.value) for cell in row))
    return table


def _by_ratio(report: SelectionReport, first: PreparationReport) -> Table:
    table = text_table(
        ("", *_ratios(report)),
        title="Share of the decode-attended tokens selected, by ratio",
        caption="± half of the 95 % interval",
    )
    for name, row in zip(report.selections, first.by_ratio, strict=True):
        table.add_row(name, *map(_pm, row))
    return table


def _losses(report: SelectionReport, first: PreparationReport) -> Table:
    table = text_table(
        ("", *_ratios(report)),
        title="Share of the loss left, by ratio (ProphetKV eq. 4)",
        caption="factors choose for each layer, selections once for all",
    )
    for name, row in zip(report.factors, first.factor_loss, strict=True):
        table.add_row(f"{name}: {FACTORS[name]}", *map(_pm, row))
    table.add_section()
    for name, row in zip(report.selections, first.selection_loss, strict=True):
        table.add_row(name, *map(_pm, row))
    return table


def _optimal(report: SelectionReport, first: PreparationReport) -> Table:
    layers = range(2, 2 + len(first.with_optimal[0]))
    table = text_table(
        ("", "mean", *map(str, layers)),
        title=f"Share of each layer's optimal tokens selected, top {report.ratio:.0%}",
        caption="layers from the second on: in the first, nothing depends on earlier tokens",
    )
    for name, mean, row in zip(report.selections, first.of_optimal, first.with_optimal, strict=True):
        table.add_row(name, _pm(mean), *(_short(cell.value) for cell in row))
    return table


def _layers(report: SelectionReport, first: PreparationReport) -> Table:
    overall, *others = first.layers
    stale = report.layer_curves.index("stale")
    columns: list[tuple[str, Sequence[Estimate]]] = [
        *zip(report.layer_curves, overall.curves, strict=True),
        *((task.task, task.curves[stale]) for task in others),
    ]
    legend = " · ".join(f"{name}: {LAYER_CURVES[name]}" for name in report.layer_curves)
    table = text_table(
        ("layer", *(name for name, _ in columns)),
        title=f"What the question's tokens of one layer find, top {report.ratio:.0%}",
        caption=f"{legend} · tasks: as {report.layer_curves[stale]} · best layer in bold",
    )
    best = [max(range(len(row)), key=lambda layer, row=row: row[layer].value) for _, row in columns]  # type: ignore[misc]
    for layer in range(len(overall.curves[0])):
        cells = (
            f"[bold]{_pm(row[layer])}[/bold]" if layer == top else _pm(row[layer])
            for (_, row), top in zip(columns, best, strict=True)
        )
        table.add_row(f"{layer + 1}", *cells)
    return table


def _agreement(report: SelectionReport, first: PreparationReport) -> Table:
    table = text_table(
        ("", *report.tasks),
        title="Are the layers that predict decoding the same on every task? Rank correlation",
        caption="on the diagonal: between the task's own odd and even prompts · 95 % intervals, which reach low where layers are close",
    )
    for name, row in zip(report.tasks, first.agreement, strict=True):
        table.add_row(
            name, *(f"{_short(cell.value)} ({_short(cell.low)}–{_short(cell.high)})" for cell in row)
        )
    return table


def _depths(report: SelectionReport, first: PreparationReport) -> Table:
    table = text_table(
        ("", *(f"{tenth}" for tenth in range(1, DEPTHS + 1)), _WIDEST),
        title="Where in the chunk the selected tokens are, by tenth",
        caption="KV deviation: of the second layer · widest ±: half of the line's widest 95 % interval",
    )
    for name, row in zip(report.selections, first.depths, strict=True):
        table.add_row(name, *_shares(row))
    table.add_row("KV deviation", *_shares(first.deviation.depths))
    return table


def _chunks(report: SelectionReport, first: PreparationReport) -> Table:
    table = text_table(
        ("", *(f"{number}" for number in range(1, len(first.chunks[0]) + 1)), _WIDEST),
        title="In which chunk the selected tokens are",
        caption="KV deviation: of the second layer · widest ±: half of the line's widest 95 % interval",
    )
    for name, row in zip(report.selections, first.chunks, strict=True):
        table.add_row(name, *_shares(row))
    table.add_row("KV deviation", *_shares(first.deviation.chunks))
    return table


def _shares(row: Sequence[Estimate]) -> list[str]:
    """Return the shares, and half the width of their widest interval."""
    return [*(_short(cell.value) for cell in row), f"{_short(max(map(half_width, row)))}"]


def _deviation(report: SelectionReport, preparation: PreparationReport) -> Table:
    found = preparation.deviation
    table = text_table(
        ("layer", "keys", "values", "relative", "left"),
        title=f"KV deviation over {preparation.name} KV (FusionRAG eq. 7)",
        caption=f"relative: of keys and values, to their squared length · left: outside the {report.ratio:.0%} worst tokens",
    )
    for layer, cells in enumerate(zip(found.keys, found.values, found.relative, found.left, strict=True), 1):
        keys, values, relative, left = (cell.value for cell in cells)
        table.add_row(f"{layer}", f"{keys:.3g}", f"{values:.3g}", f"{relative:.4f}", _short(left))
    return table


def _answers(found: AnswersReport) -> Table:
    table = text_table(
        ("", *(f"{ratio:.0%}" for ratio in found.ratios), *(f"KL {ratio:.0%}" for ratio in found.ratios)),
        title="Answers after recomputing idealised selections: score, and the first token's KL (ProphetKV fig. 9)",
        caption=f"full attention {_pm(found.full_score)} · nothing recomputed {_pm(found.stale_score)},"
        f" KL {_pm(found.stale_kl)} · ± half of the 95 % interval",
    )
    for name, score, kl in zip(found.selections, found.score, found.kl, strict=True):
        table.add_row(name, *map(_pm, score), *map(_pm, kl))
    return table


def _auxiliary(report: SelectionReport, found: AuxiliaryReport) -> Table:
    table = text_table(
        ("", "KL, nats", "Jaccard, top 20 %"),
        title=f"Predicting the last layer of {report.model} (CacheClip §2.8)",
        caption=f"{found.samples} samples, {found.left_out} left out · ± half of the 95 % interval",
    )
    table.add_row(f"last layer of {found.name}", _pm(found.kl), _pm(found.jaccard))
    table.add_row("its own first layer", _pm(found.own_kl), _pm(found.own_jaccard))
    table.add_row("difference, paired", _pm(found.kl_difference), _pm(found.jaccard_difference))
    return table


def _ratios(report: SelectionReport) -> list[str]:
    return [f"{ratio:.0%}" for ratio in report.ratios]


def _short(value: float) -> str:
    return f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}".removesuffix(".00")


def _pm(estimate: Estimate) -> str:
    return f"{_short(estimate.value)} ±{_short(half_width(estimate))}"
