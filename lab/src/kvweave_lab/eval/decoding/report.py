"""The evaluation of decoding as JSON, terminal tables, figures and an HTML page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure
from rich.table import Table

from kvweave.results import facts
from kvweave_lab.eval.decoding.measure import DecodingResult
from kvweave_lab.eval.decoding.results import (
    AFTER_STEPS,
    OVERALL,
    ClusterReuse,
    ComparisonRow,
    Row,
    budget_text,
    sum_reuse,
)
from kvweave_lab.eval.decoding.shift import GLOBAL, UPDATES, Shift
from kvweave_lab.eval.long_texts import MIN_DISTANCE
from kvweave_lab.report import flatten, half_width, json_bytes, text_table, write_files
from kvweave_lab.report.figures import (
    Theme,
    add_series_legend,
    new_figure,
    plot_estimates,
    render,
    styles_of,
)
from kvweave_lab.report.page import Page, html_figure, html_table, render_page
from kvweave_lab.statistics import Estimate
from kvweave_lab.strategies import DENSE

AnyRow = TypeVar("AnyRow", Row, ComparisonRow)


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """Shares of updated clusters and of randomly drawn ones (`any`) that were retrieved within AFTER_STEPS."""

    strategy: str
    budget: float
    storage: str
    clusters: int
    updated: tuple[float, ...]
    any: tuple[float, ...]


def write(folder: Path, done: DecodingResult, about: dict[str, Any]) -> list[Path]:
    """Write decoding.json, the figures and the page, in this order.

    `about` holds command, version, date and whatever else belongs to the results. Raises InvalidRequest if the folder
    cannot be written to.
    """
    images = figures(done)
    values = content(done, about)
    files = {"decoding.json": json_bytes(values)}
    files |= {f"decoding-{name}.png": image for name, image in images.items()}
    files["decoding.html"] = _page(done, values["about"], images).encode()
    return write_files(folder, files)


def content(done: DecodingResult, about: dict[str, Any]) -> dict[str, Any]:
    """Return the results as JSON values; an interval is under its estimate's name with `_interval`."""
    request = done.request
    settings = {
        "model": done.model,
        "dtype": done.dtype,
        "split": request.split,
        "seeds": list(request.seeds),
        "texts": _text_count(done),
        "prompt_tokens": max(run.prompt_tokens for run in done.runs),
        "resident_bytes": done.resident_bytes,
        "retrieved_after_steps": list(AFTER_STEPS),
    }
    return {
        "about": settings | about,
        "rows": [flatten(row) for row in done.rows],
        "beside": [flatten(row) for row in done.comparisons],
        "returns": facts(reuse_rows(done)),
        "shift": facts(done.shift),
    }


def reuse_rows(done: DecodingResult) -> list[ReuseRow]:
    """Return a row for every variant with clusters."""
    rows = []
    for label in dict.fromkeys((run.variant, run.budget, run.storage) for run in done.runs):
        own = [run for run in done.runs if (run.variant, run.budget, run.storage) == label]
        updated, drawn = sum_reuse([run.updated for run in own]), sum_reuse([run.drawn for run in own])
        if updated.seen and drawn.seen:
            rows.append(ReuseRow(*label, updated.seen, _shares(updated), _shares(drawn)))
    return rows


def _shares(reuse: ClusterReuse) -> tuple[float, ...]:
    return tuple(count / reuse.seen for count in reuse.retrieved)


def _text_count(done: DecodingResult) -> int:
    return len({run.text for run in done.runs})


def summary(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Return the rows over all tasks, or all rows if there is one task."""
    return [row for row in rows if row.task == OVERALL] or list(rows)


# Tables


_COLUMNS = (
    "length|strategy|budget|recall|error|score|dense|agrees|pages|read|reads|run|hits|memory|per token|variance"
).split("|")
_COMPARISON_COLUMNS = "length|compared with|budget|missed|pages|reads".split("|")
_REUSE_COLUMNS = ("strategy", "clusters", *map(str, AFTER_STEPS))


def quality_table(done: DecodingResult) -> Table:
    """Return every variant at every length, over all tasks."""
    caption = (
        f"{_text_count(done):,} texts, {len(done.request.seeds)} seeds · ± half of a 95 % interval"
        " · each row covers the steps since the row before"
    )
    return _text_table(done.model, caption, _COLUMNS, _cells(done))


def comparison_table(done: DecodingResult) -> Table:
    """Return dynakv compared with the other strategies, over all tasks."""
    caption = "missed recall, pages and reads of dynakv as shares of the other strategy's"
    return _text_table("dynakv compared with others", caption, _COMPARISON_COLUMNS, _comparison_cells(done))


def reuse_table(done: DecodingResult) -> Table:
    """Return how often clusters are retrieved again, updated ones and randomly drawn ones."""
    table = text_table(_REUSE_COLUMNS, names=2, title="retrieved within N steps")
    for cells in _reuse_cells(done):
        table.add_row(*cells)
    return table


def _text_table(title: str, caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = text_table(columns, names=0, title=title, caption=caption)
    table.columns[1].justify = "left"
    for cells in rows:
        table.add_row(*cells)
    return table


def _cells(done: DecodingResult) -> list[list[str]]:
    return [
        [
            f"{row.decode_tokens:,}",
            _strategy_text(row),
            budget_text(row.budget),
            *map(_estimate_text, (row.recall, row.output_error, row.score, row.dense_score, row.agreement)),
            f"{row.pages_read_per_token:,.1f}",
            f"{row.bytes_per_token / 1000:,.0f} kB",
            f"{row.reads_per_token:,.1f}",
            f"{row.mean_run_entries:.0f}",
            f"{row.hit_rate:.0%}",
            f"{row.resident_bytes / 1e6:,.1f} MB",
            f"{row.latency_s_per_token * 1e3:,.0f} ms",
            "" if row.cluster_variance is None else f"{row.cluster_variance:.3g}",
        ]
        for row in summary(done.rows)
    ]


def _comparison_cells(done: DecodingResult) -> list[list[str]]:
    return [
        [
            f"{row.decode_tokens:,}",
            _strategy_text(row),
            budget_text(row.budget),
            *map(_estimate_text, (row.missed, row.pages, row.reads)),
        ]
        for row in summary(done.comparisons)
    ]


def _reuse_cells(done: DecodingResult) -> list[list[str]]:
    return [
        [f"{row.strategy} {row.budget:g}", kind, *(f"{share:.0%}" for share in shares)]
        for row in reuse_rows(done)
        for kind, shares in (("updated", row.updated), ("any", row.any))
    ]


def _strategy_text(row: Row | ComparisonRow) -> str:
    return row.strategy if row.storage == "exact" else f"{row.strategy}, {row.storage}"


def _estimate_text(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.3f} ±{half_width(estimate):.3f}"


# The page


_DEFINITIONS = (
    ("recall", "share of the exact best entries outside the recent window that were attended to"),
    ("error", "distance of a layer's attention output from exact attention's, relative to its length"),
    (
        "score, dense",
        "answers that greedy decoding gets right, and that dense decoding gets right; only answers with evidence at"
        f" least {MIN_DISTANCE} tokens before",
    ),
    ("agrees", "greedy tokens that equal dense decoding's on the same text"),
    (
        "pages, read, reads, run, hits",
        "read from the disk per token, over all layers and heads; entries per read; share of clusters already in memory",
    ),
    ("memory", "peak of KV in memory, including everything that holds it"),
    (
        "per token",
        "the median step without recording; compare it within this page only: `kvweave bench decode` measures cost",
    ),
    ("variance", "mean squared distance of keys to the centroid of their cluster"),
)


def _page(done: DecodingResult, about: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    shown = {name.replace("_", " "): value for name, value in about.items() if name != "command"}
    return render_page(
        Page(
            title="Long decoding with the KV on disk",
            model=done.model,
            summary="Texts far longer than their prompts, decoded under every strategy with the same share of their"
            " entries: how much each finds of what dense attention attends to, and which answers stay right.",
            facts=[
                (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
                for name, value in shown.items()
            ],
            sections=[
                _section(
                    "Figures", "", "\n".join(html_figure(image, name) for name, image in images.items())
                ),
                _section(
                    "By length",
                    "Over all kinds of texts; each row covers the steps since the length before."
                    " ± is half of a 95 % interval over texts.",
                    html_table(_COLUMNS, _cells(done)),
                ),
                _section(
                    "dynakv compared with others",
                    "Missed recall and reads from the disk, as shares of another strategy's on the same texts.",
                    html_table(_COMPARISON_COLUMNS, _comparison_cells(done)),
                ),
                _section(
                    "Clusters that are retrieved again",
                    "Share retrieved within N steps after they took an entry in or were split, and of clusters drawn"
                    " at random at the same time.",
                    html_table(_REUSE_COLUMNS, _reuse_cells(done)),
                ),
            ],
            definitions=_DEFINITIONS,
            repeat_note="Every figure of this page is in <code>decoding.json</code> in the same folder.",
            command=str(about.get("command", "")),
            version=str(about.get("version", "")),
            date=str(about.get("date", "")),
        )
    )


def _section(heading: str, note: str, body: str) -> str:
    return f"<h2>{heading}</h2>\n" + (f'<p class="note">{note}</p>\n' if note else "") + body


# Figures


Label = tuple[str, str, float]
"""Variant, storage, budget."""


def figures(done: DecodingResult) -> dict[str, bytes]:
    """Draw PNG images by name; those of the shift only if it was measured."""
    note = f"{done.model} · {_text_count(done):,} texts, {len(done.request.seeds)} seeds"
    rows = summary(done.rows)
    lines: list[tuple[str, str, str, Callable[[Row], Estimate | None]]] = [
        ("missed", "Entries that retrieval misses", "1 − recall", _missed),
        ("error", "Relative error of the attention output", "output error", lambda row: row.output_error),
    ]
    if any(row.score is not None for row in rows):
        lines.append(("score", "Answers with far evidence", "score", lambda row: row.score))
    images = {
        name: render(partial(_line_figure, rows, title, axis, note, value))
        for name, title, axis, value in lines
    }
    if done.shift is not None:
        images["variance"] = render(partial(_variance_figure, done.shift, done.model))
        images["shift"] = render(partial(_shift_figure, done.shift, done.model))
    return images


def _missed(row: Row) -> Estimate | None:
    if row.recall is None:
        return None
    return Estimate(1 - row.recall.value, 1 - row.recall.high, 1 - row.recall.low)


def _line_figure(
    rows: Sequence[Row],
    title: str,
    axis: str,
    note: str,
    value: Callable[[Row], Estimate | None],
    theme: Theme,
) -> Figure:
    """Draw a line per variant, storage and budget by decode length, with its interval."""
    labels: dict[str, Label] = {
        _label_text(label): label for label in ((row.strategy, row.storage, row.budget) for row in rows)
    }
    figure = new_figure(7.2, 4.2, title, note, theme)
    axes = figure.subplots()
    styles = styles_of(list(labels), theme)
    for name, label in labels.items():
        own = [row for row in rows if (row.strategy, row.storage, row.budget) == label]
        points = [(row.decode_tokens, one) for row in own if (one := value(row)) is not None]
        plot_estimates(
            axes, [length for length, _ in points], [one for _, one in points], styles[name], theme
        )
    axes.set_xlabel("tokens decoded")
    axes.set_ylabel(axis)
    axes.set_ylim(bottom=0)
    add_series_legend(figure, styles, theme)
    return figure


def _label_text(label: Label) -> str:
    variant, storage, budget = label
    if variant == DENSE:
        return variant
    return " ".join([variant, budget_text(budget), *([] if storage == "exact" else [storage])])


def _variance_figure(shift: Shift, model: str, theme: Theme) -> Figure:
    """Draw each update's variance by decode length, and that of as many k-means clusters of all keys."""
    note = f"{model} · {shift.text} · dashed: as many k-means clusters of all keys"
    figure = new_figure(7.2, 3.6, "Variance inside clusters", note, theme)
    axes = figure.subplots()
    styles = styles_of(UPDATES, theme)
    for update in UPDATES:
        own = [part for part in shift.groupings if part.update == update]
        lengths, color = [part.decode_tokens for part in own], styles[update].color
        axes.plot(lengths, [part.variance for part in own], color=color, marker=styles[update].marker)
        axes.plot(lengths, [part.anew for part in own], color=color, linestyle="--", linewidth=1)
    axes.set_xlabel("tokens decoded")
    axes.set_ylabel("mean squared distance")
    axes.set_ylim(bottom=0)
    add_series_legend(figure, styles, theme)
    return figure


def _shift_figure(shift: Shift, model: str, theme: Theme) -> Figure:
    """Draw one head's keys on two axes, coloured by cluster, with a panel per update (DynaKV figure 4)."""
    panels: Mapping[str, str] = {GLOBAL: GLOBAL, **{update: f"{update} update" for update in UPDATES}}
    note = f"{model} · {shift.text} · layer {shift.layer + 1}, KV head {shift.head + 1} · two principal components"
    figure = new_figure(9.6, 2.9, "Keys by cluster at the end of the text", note, theme)
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True)
    for axes, (name, title) in zip(grid, panels.items(), strict=True):
        points = shift.points.get(name, ())
        axes.scatter(
            [x for x, _, _ in points],
            [y for _, y, _ in points],
            c=[theme.palette[number % len(theme.palette)] for *_, number in points],
            s=3,
            linewidths=0,
        )
        axes.set_title(title)
        axes.tick_params(labelbottom=False, labelleft=False)
    return figure
