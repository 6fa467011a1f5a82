"""The generated part of lab/docs/personas.md: what `kvweave eval personas` measured."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tables import NOT_MEASURED, header
from tables import row as line

Row = Mapping[str, Any]
_RATES = ("qa_hit", "other_words", "foreseen", "kv_hit", "kv_foreseen")


def whole_systems(told: Mapping[str, Any] | None) -> str:
    """Both tables, who is faster than whom, the further experiments, the scheduler, operations and items."""
    if told is None:
        return NOT_MEASURED
    about = told["about"]
    parts = [
        f"{about['users']:,} users with {about['questions']:,} questions; kvweave reuses KV by `{about['recipe of kvweave']}`. "
        f"`{about['command']}`, {about['date']}, {about['commit']}. Brackets: 95 % intervals over users.",
    ]
    for table, title in (("A", "A: projection reuse (priced)"), ("B", "B: ordinary reuse")):
        rows = [row for row in told["systems"] if row["table"] == table]
        parts += [f"**{title}**", "\n".join(_systems(rows))]
    parts += [_figure("mean latency of a question", "personas")]
    parts += ["**Who is faster**", "\n".join(_pairs(told["pairs"]))]
    for experiment in dict.fromkeys(row["experiment"] for row in told["further"]):
        rows = [row for row in told["further"] if row["experiment"] == experiment]
        here = [row for row in rows if row["table"] == "B"]
        if experiment != "scheduler":
            parts += [
                f"**{experiment.capitalize()}** (B, {here[0]['users']} users)",
                "\n".join(_systems(here)),
                _figure(f"by {experiment}", f"personas-{experiment}"),
            ]
    if told["scheduler savings"]:
        parts += ["**The scheduler**", "\n".join(_savings(told["scheduler savings"]))]
        parts += [_figure("the scheduler, question by question", "personas-scheduler")]
    parts += ["**Operations and items**", "\n".join(_operations(told["operations"]))]
    return "\n\n".join(parts)


def _systems(rows: Sequence[Row]) -> Iterable[str]:
    yield from header(
        "",
        "mean",
        "95 %",
        "QA hit",
        "other words",
        "QA ahead",
        "KV hit",
        "KV ahead",
        "ROUGE-L",
        "exact",
        "BLEU",
        "GFLOP",
        "idle TFLOP",
        "MB",
    )
    for row in rows:
        yield line(
            row["trial"],
            f"{_told(row['mean_s'], '.3f')} s",
            f"{row['tail_s']:.2f} s",
            *(f"{row[name]['value']:.1%}" for name in _RATES),
            _told(row["rouge_l"], ".3f"),
            f"{row['exact_match']['value']:.3f}",
            "" if row["bleu"] is None else f"{row['bleu']['value']:.3f}",
            f"{row['request_flops'] / 1e9:,.0f}",
            f"{row['idle_flops'] / 1e12:.2f}",
            f"{row['stored_bytes'] / 1e6:,.1f}",
        )


def _pairs(rows: Sequence[Row]) -> Iterable[str]:
    yield from header("table", "", "than", "faster", "ROUGE-L", "exact", "best user")
    for row in rows:
        yield line(
            row["table"],
            row["system"],
            row["other"],
            _told(row["faster"], "+.1%"),
            _told(row["rouge_l"], "+.3f"),
            _told(row["exact_match"], "+.3f"),
            f"{row['best_user']:+.1%}",
        )


def _savings(rows: Sequence[Row]) -> Iterable[str]:
    yield from header("", "idle operations saved", "latency saved after the change")
    for row in rows:
        yield line(row["experiment"], f"{row['idle_flops']:+.1%}", f"{row['latency']:+.1%}")


def _operations(rows: Sequence[Row]) -> Iterable[str]:
    yield from header("", "time", "bytes")
    for row in rows:
        seconds = "" if row["seconds"] is None else f"{1e3 * row['seconds']:,.2f} ms"
        size = "" if row["bytes"] is None else f"{row['bytes']:,.0f}"
        yield line(row["name"], seconds, size)


def _figure(said: str, name: str) -> str:
    return f"![{said}](images/{name}.png)"


def _told(estimate: Row, form: str) -> str:
    low, high = (format(estimate[bound], form) for bound in ("low", "high"))
    return f"{estimate['value']:{form}} ({low}–{high})"
