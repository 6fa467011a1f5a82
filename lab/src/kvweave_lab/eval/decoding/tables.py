"""The evaluation of decoding as plain values for programs and tables for a terminal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from rich.table import Table

from kvweave.engine.facts import facts
from kvweave_lab.eval.decoding.measure import Quality
from kvweave_lab.eval.decoding.outcome import AFTER_STEPS, Again
from kvweave_lab.eval.decoding.returning import together
from kvweave_lab.eval.decoding.rows import OVERALL, Beside, Row, budget_text
from kvweave_lab.eval.results import Estimate

Summed = TypeVar("Summed", Row, Beside)


@dataclass(frozen=True, slots=True)
class ReturnRow:
    """Share of clusters retrieved within AFTER_STEPS, of the updated ones and of ones drawn at random."""

    strategy: str
    budget: float
    storage: str
    clusters: int
    updated: tuple[float, ...]
    any: tuple[float, ...]


def return_rows(done: Quality) -> list[ReturnRow]:
    """Every variant that has clusters."""
    rows = []
    for label in dict.fromkeys((run.variant, run.budget, run.storage) for run in done.runs):
        own = [run for run in done.runs if (run.variant, run.budget, run.storage) == label]
        updated, drawn = (together([getattr(run, name) for run in own]) for name in ("updated", "any"))
        if updated.seen and drawn.seen:
            rows.append(ReturnRow(*label, updated.seen, _shares(updated), _shares(drawn)))
    return rows


def content(done: Quality, about: dict[str, Any]) -> dict[str, Any]:
    """Everything in plain values; an interval stands beside its figure, under its name with `_interval`."""
    request = done.request
    told = {
        "model": done.model,
        "dtype": done.dtype,
        "split": request.split,
        "seeds": list(request.seeds),
        "texts": len({run.text for run in done.runs}),
        "prompt_tokens": max(run.prompt_tokens for run in done.runs),
        "resident_bytes": done.resident_bytes,
        "retrieved_after_steps": list(AFTER_STEPS),
    }
    return {
        "about": told | about,
        "rows": [plain(row) for row in done.rows],
        "beside": [plain(row) for row in done.beside],
        "returns": facts(return_rows(done)),
        "shift": facts(done.shift),
    }


def plain(row: Row | Beside) -> dict[str, Any]:
    """A row as JSON has it."""
    told: dict[str, Any] = {}
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Estimate):
            told[field.name] = value.value
            told[f"{field.name}_interval"] = [value.low, value.high]
        else:
            told[field.name] = value
    return told


def summary(rows: Sequence[Summed]) -> list[Summed]:
    """The rows over all tasks, or all of them where there is one task."""
    return [row for row in rows if row.task == OVERALL] or list(rows)


COLUMNS = (
    "length",
    "strategy",
    "budget",
    "recall",
    "error",
    "score",
    "dense",
    "agrees",
    "pages",
    "read",
    "reads",
    "run",
    "hits",
    "memory",
    "per token",
    "variance",
)
"""Headings of a row's cells."""


def cells(row: Row) -> list[str]:
    """A row for people."""
    return [
        f"{row.decode_tokens:,}",
        row.strategy if row.storage == "exact" else f"{row.strategy}, {row.storage}",
        budget_text(row.budget),
        _told(row.recall),
        _told(row.output_error),
        _told(row.score),
        _told(row.dense_score),
        _told(row.agreement),
        f"{row.pages_read_per_token:,.1f}",
        f"{row.bytes_per_token / 1000:,.0f} kB",
        f"{row.reads_per_token:,.1f}",
        f"{row.mean_run_entries:.0f}",
        f"{row.hit_rate:.0%}",
        f"{row.resident_bytes / 1e6:,.1f} MB",
        f"{row.latency_s_per_token * 1e3:,.0f} ms",
        "" if row.cluster_variance is None else f"{row.cluster_variance:.3g}",
    ]


def quality_table(done: Quality) -> Table:
    """Every variant at every length, over all tasks."""
    texts = len({run.text for run in done.runs})
    caption = f"{texts:,} texts, {len(done.request.seeds)} seeds · ± half of a 95 % interval · a row's steps are those since the row before"
    return _table(done.model, caption, COLUMNS, "strategy", map(cells, summary(done.rows)))


BESIDE_COLUMNS = ("length", "beside", "budget", "missed", "pages", "reads")
"""Headings of what `beside_cells` gives."""


def beside_cells(done: Quality) -> list[list[str]]:
    """What `dynakv` comes to beside other strategies over all tasks, for people."""
    return [
        [
            f"{row.decode_tokens:,}",
            row.strategy if row.storage == "exact" else f"{row.strategy}, {row.storage}",
            budget_text(row.budget),
            _told(row.missed),
            _told(row.pages),
            _told(row.reads),
        ]
        for row in summary(done.beside)
    ]


def beside_table(done: Quality) -> Table:
    """The same for a terminal."""
    caption = "missed recall, pages and reads of dynakv as shares of the other strategy's"
    return _table("dynakv beside others", caption, BESIDE_COLUMNS, "beside", beside_cells(done))


def return_table(done: Quality) -> Table:
    """How often clusters are retrieved again, updated ones beside any."""
    table = Table(box=None, header_style="bold", title="retrieved within so many steps", title_justify="left")
    table.add_column("strategy")
    table.add_column("clusters")
    for steps in AFTER_STEPS:
        table.add_column(str(steps), justify="right")
    for row in return_rows(done):
        for kind, shares in (("updated", row.updated), ("any", row.any)):
            table.add_row(f"{row.strategy} {row.budget:g}", kind, *(f"{share:.0%}" for share in shares))
    return table


def _table(
    title: str, caption: str, columns: Sequence[str], named: str, rows: Iterable[Sequence[str]]
) -> Table:
    """`named` is the column of names."""
    table = Table(box=None, header_style="bold", title=title, title_justify="left", caption=caption)
    table.caption_justify = "left"
    for name in columns:
        table.add_column(name, justify="left" if name == named else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _shares(again: Again) -> tuple[float, ...]:
    return tuple(count / again.seen for count in again.retrieved)


def _told(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    return f"{estimate.value:.3f} ±{(estimate.high - estimate.low) / 2:.3f}"
