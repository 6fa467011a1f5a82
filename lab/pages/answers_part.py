"""The generated part of lab/docs/answers.md: what `kvweave eval lookalikes` measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from tables import NOT_MEASURED, header
from tables import row as line

Row = Mapping[str, Any]
_SHOWN = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95)


def told_apart(told: Mapping[str, Any] | None) -> str:
    """Each matcher at some thresholds, and by kind of pairs at its own."""
    if told is None:
        return NOT_MEASURED
    about = told["about"]
    rows = [row for row in told["rows"] if row["is_default"] or row["threshold"] in _SHOWN]
    return "\n\n".join(
        (
            f"{about['paraphrases']:,} paraphrases and {about['lookalikes']:,} look-alikes of {about['split']}, {about['embedding']}. "
            f"`{about['command']}`, {about['date']}, {about['commit']}. Bold: the threshold that a matcher comes with.",
            "\n".join([*header("matcher", "threshold", "hit rate", "false-hit rate"), *map(_rates, rows)]),
            "\n".join(_kinds(told["kinds"])),
            "![Share of paraphrases that hit against share of look-alikes that hit](images/lookalikes.png)",
        )
    )


def _rates(row: Row) -> str:
    threshold = f"{row['threshold']:.2f}"
    return line(
        row["matcher"],
        f"**{threshold}**" if row["is_default"] else threshold,
        _share(row, "hit_rate", 1),
        _share(row, "false_hit_rate", 2),
    )


def _kinds(rows: Sequence[Row]) -> list[str]:
    matchers = list(dict.fromkeys(row["matcher"] for row in rows))
    lines = header("kind", "pairs", *matchers)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        here = [row for row in rows if row["kind"] == kind]
        shares = (f"{row['accepted'] / row['pairs']:.1%}" for row in here)
        lines.append(line(kind, f"{here[0]['pairs']:,}", *shares))
    return lines


def _share(row: Row, name: str, digits: int) -> str:
    low, high = (f"{bound:.{digits}%}" for bound in row[f"{name}_interval"])
    return f"{row[name]:.{digits}%} ({low}–{high})"
