"""The evaluation as tables for a terminal, plain values for programs, and files."""

import json
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.lookalikes.measure import Lookalikes, MatcherRow
from kvweave_lab.eval.results import Estimate

_JSON: Final = "lookalikes.json"
_PNG: Final = "lookalikes.png"
_SHOWN: Final = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


def content(done: Lookalikes, circumstances: dict[str, Any]) -> dict[str, Any]:
    """Everything in plain values; `circumstances` are those of the measurement.

    A rate's interval stands beside it as [low, high], under its name with `_interval`.
    """
    return {
        "about": {
            **circumstances,
            "split": done.split,
            "seed": done.seed,
            "embedding": done.embedding,
            "paraphrases": done.paraphrases,
            "lookalikes": done.lookalikes,
        },
        "rows": [_plain(row) for row in done.rows],
        "kinds": [
            {"matcher": row.matcher, "kind": row.kind, "pairs": row.pairs, "accepted": row.accepted}
            for row in done.kinds
        ],
    }


def curve_table(done: Lookalikes) -> Table:
    """Some thresholds of every matcher, the one it comes with marked."""
    caption = (
        f"{done.paraphrases:,} paraphrases, {done.lookalikes:,} look-alikes · * the threshold it comes with"
        " · brackets: 95 % interval"
    )
    table = Table(box=None, header_style="bold", caption=caption)
    table.caption_justify = "left"
    table.add_column("matcher")
    for name in ("threshold", "hit_rate", "false_hit_rate"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in done.rows:
        if row.is_default or row.threshold in _SHOWN:
            mark = "*" if row.is_default else ""
            table.add_row(
                row.matcher,
                f"{row.threshold:.2f}{mark}",
                _told(row.hit_rate, 1),
                _told(row.false_hit_rate, 2),
            )
    return table


def kind_table(done: Lookalikes) -> Table:
    """What each matcher lets through at the threshold it comes with, kind by kind."""
    matchers = list(dict.fromkeys(row.matcher for row in done.kinds))
    table = Table(box=None, header_style="bold")
    table.add_column("kind")
    for name in ("pairs", *matchers):
        table.add_column(name, justify="right")
    for kind in dict.fromkeys(row.kind for row in done.kinds):
        rows = [row for row in done.kinds if row.kind == kind]
        shares = [f"{row.accepted / row.pairs:.1%}" for row in rows]
        table.add_row(kind, f"{rows[0].pairs:,}", *shares)
    return table


def write(folder: Path, done: Lookalikes, circumstances: dict[str, Any]) -> list[Path]:
    """Write lookalikes.json and lookalikes.png; raises InvalidRequest if the folder cannot be written to."""
    from kvweave_lab.eval.lookalikes.plot import curve

    plain = json.dumps(content(done, circumstances), ensure_ascii=False, indent=1).encode()
    files = {_JSON: plain + b"\n", _PNG: curve(done)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise InvalidRequest(
            f"{folder} cannot be written to ({error.strerror}); name another --output"
        ) from error
    return [folder / name for name in files]


def _plain(row: MatcherRow) -> dict[str, Any]:
    return {
        "matcher": row.matcher,
        "threshold": row.threshold,
        "is_default": row.is_default,
        "hit_rate": row.hit_rate.value,
        "hit_rate_interval": [row.hit_rate.low, row.hit_rate.high],
        "false_hit_rate": row.false_hit_rate.value,
        "false_hit_rate_interval": [row.false_hit_rate.low, row.false_hit_rate.high],
    }


def _told(rate: Estimate, digits: int) -> str:
    return f"{rate.value:.{digits}%} ({rate.low:.{digits}%}–{rate.high:.{digits}%})"
