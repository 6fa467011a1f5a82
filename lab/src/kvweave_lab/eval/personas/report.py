"""The comparison as tables for a terminal, plain values for programs, and files."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.table import Table as Shown

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.personas.comparison import Comparison
from kvweave_lab.eval.personas.pricing import TABLES, Table
from kvweave_lab.eval.personas.scheduler import savings
from kvweave_lab.eval.personas.summary import SystemRow
from kvweave_lab.eval.results import Estimate

_JSON: Final = "personas.json"
_TITLES: Final[dict[Table, str]] = {
    "A": "A · projection reuse, as PerCache replays it",
    "B": "B · ordinary reuse: stored tokens are not run",
}


def content(done: Comparison, circumstances: dict[str, Any]) -> dict[str, Any]:
    """Everything in plain values; `circumstances` are those of the measurement. Estimates have value, low and high."""
    return {
        "about": {**circumstances, **done.about},
        "costs": asdict(done.costs),
        "systems": [asdict(row) for row in done.systems],
        "pairs": [asdict(row) for row in done.pairs],
        "users": [asdict(row) for row in done.users],
        "further": [asdict(row) for row in done.further],
        "scheduler": [asdict(row) for row in done.scheduler],
        "scheduler savings": [asdict(saving) for saving in savings(done.scheduler)],
        "operations": [asdict(row) for row in done.operations],
    }


def tables(done: Comparison) -> list[Shown]:
    """Tables A and B, who is faster than whom, the further experiments, the scheduler, and what operations take."""
    shown = [
        _systems(_TITLES[table], [row for row in done.systems if row.table == table]) for table in TABLES
    ]
    shown.append(_pairs(done))
    for experiment in dict.fromkeys(row.experiment for row in done.further):
        rows = [row for row in done.further if row.experiment == experiment]
        shown += [
            _systems(f"{experiment} · {table}", [row for row in rows if row.table == table])
            for table in TABLES
        ]
    if done.scheduler:
        shown.append(_scheduler(done))
    shown.append(_operations(done))
    return shown


def _systems(title: str, rows: Sequence[SystemRow]) -> Shown:
    caption = (
        f"{rows[0].users} users, {rows[0].questions} questions · ahead: what predicted questions have left"
        " · intervals and more: in the JSON"
    )
    table = _table(title, caption)
    table.add_column("system", no_wrap=True)
    for name in ("mean s", "95 %", "QA %", "ahead", "KV %", "ahead", "ROUGE-L", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
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


def _pairs(done: Comparison) -> Shown:
    table = _table("who is faster", "share of mean latency saved (paired 95 % interval), gain in ROUGE-L")
    for name in ("", "system", "than"):
        table.add_column(name, no_wrap=True)
    for name in ("faster", "ROUGE-L"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in done.pairs:
        table.add_row(
            row.table, row.system, row.other, _told(row.faster, "+.1%"), f"{row.rouge_l.value:+.3f}"
        )
    return table


def _scheduler(done: Comparison) -> Shown:
    table = _table("the scheduler", "operations at idle time, and latency after the change, saved by it")
    table.add_column("experiment")
    for name in ("idle operations", "latency"):
        table.add_column(name, justify="right")
    for saving in savings(done.scheduler):
        table.add_row(saving.experiment, f"{saving.idle_flops:+.1%}", f"{saving.latency:+.1%}")
    return table


def _operations(done: Comparison) -> Shown:
    table = _table("operations and items", "PerCache's requests, ordinary reuse")
    table.add_column("what")
    for name in ("ms", "bytes"):
        table.add_column(name, justify="right")
    for row in done.operations:
        table.add_row(
            row.name,
            "" if row.seconds is None else f"{1e3 * row.seconds:.2f}",
            "" if row.bytes is None else f"{row.bytes:,.0f}",
        )
    return table


def write(folder: Path, done: Comparison, circumstances: dict[str, Any]) -> list[Path]:
    """Write personas.json and the figures; raises InvalidRequest if the folder cannot be written to."""
    from kvweave_lab.eval.personas.plots import figures

    plain = json.dumps(content(done, circumstances), ensure_ascii=False, indent=1).encode()
    files = {_JSON: plain + b"\n", **figures(done)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise InvalidRequest(
            f"{folder} cannot be written to ({error.strerror}); name another --output"
        ) from error
    return [folder / name for name in files]


def _table(title: str, caption: str) -> Shown:
    table = Shown(title=title, caption=caption, box=None, header_style="bold")
    table.title_justify = table.caption_justify = "left"
    table.pad_edge = False
    return table


def _told(estimate: Estimate, form: str) -> str:
    low, high = (format(bound, form) for bound in (estimate.low, estimate.high))
    return f"{estimate.value:{form}} ({low}–{high})"
