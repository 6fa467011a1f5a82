"""Rows about single figures and tables of papers: what a figure says, and what the results here say to it.

A row's verdict is computed from results, so that it changes with them. Rows that cannot be measured here give the reason.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Results = Callable[[str], Mapping[str, Any] | None]
"""Returns a file of lab/results by its name without ending, None without it."""


class Seen(NamedTuple):
    """What was seen: True if it held, False if the opposite did, None if neither is certain or the gain is smaller."""

    held: bool | None
    where: str
    numbers: str
    verdict: str = ""  # in words, where points of a figure differ


Measure = Callable[[Results], Seen | None]
"""Returns what was seen, None where the results are not there."""


class Figure(NamedTuple):
    """A figure or table of a paper: its name, what it says, and a measure or why there is none here.

    `unmeasured` is the verdict without a measure: whether it cannot be measured here, or was not.
    """

    name: str
    says: str
    seen: Measure | str
    unmeasured: str = "not measurable here"


NOT_MEASURED = "not measured"
"""The verdict on what could be measured here."""


class Number(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


def number(content: Mapping[str, Any], name: str | None = None) -> Number:
    """Return a number of a result: with `low` and `high` beside it, or with `<name>_interval`."""
    if name is None:
        return Number(content["value"], content["low"], content["high"])
    return Number(content[name], *content[f"{name}_interval"])


def shown(value: Number, form: str = ".3f") -> str:
    return f"{value.value:{form}} ({value.low:{form}} to {value.high:{form}})"


def above(first: Number, second: Number | float) -> bool | None:
    """Return whether the first is larger; None where the intervals do not tell."""
    other = second if isinstance(second, Number) else Number(second, second, second)
    return True if first.low > other.high else False if first.high < other.low else None


def reaches(value: float, least: float, even: float = 1.0) -> bool | None:
    """Return True at the paper's figure or beyond, None between that and no gain at all, False below."""
    return True if value >= least else None if value > even else False


def together(verdicts: Iterable[bool | None]) -> bool | None:
    """Return True if all held, False if the opposite of any was seen."""
    found = list(verdicts)
    return False if False in found else None if None in found else True


REFERENCE = "shipped 10 MB model"
LONGER = "10 MB model for longer texts"


def claim(name: str, *kinds: str) -> Measure:
    """Return the verdicts of an experiment of `lab/experiments/papers/` whose statements contain one of the words."""

    def seen(results: Results) -> Seen | None:
        from papers import CLAIMS

        measured = (results("claims") or {}).get("claims", {}).get(name)
        if measured is None:
            return None
        told = [one.held for one in CLAIMS[name].verdicts(measured) if _any_of(one.statement, kinds)]
        where = f"{REFERENCE}, 512 tokens, {measured['prompts']} prompts of a task"
        numbers = f"{len(told)} points: see [below](#{_anchor(name)})"
        return Seen(together(told), where, numbers, in_words(told))

    return seen


def in_words(told: list[bool | None]) -> str:
    """Return how many points held, were not seen, and were the opposite."""
    words = {True: "held", None: "not seen", False: "the opposite"}
    return ", ".join(f"{word} {told.count(held)}" for held, word in words.items() if held in told)


def _any_of(statement: str, kinds: tuple[str, ...]) -> bool:
    return not kinds or any(kind in statement for kind in kinds)


def _anchor(name: str) -> str:
    from papers import CLAIMS

    return CLAIMS[name].title.lower().replace(" ", "-")


def score_rows(results: Results, file: str, task: str, ratio: float) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a file of scores for a task, at a ratio, by recipe; full attention and reuse too."""
    rows = (results(file) or {"rows": []})["rows"]
    return {
        row["recipe"]: row
        for row in rows
        if row["task"] == task and (row["ratio"] == ratio or row["recipe"] in ("full", "reuse"))
    }


def present(rows: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of some recipes that was measured: a method's own reading before an earlier one."""
    return next((name for name in names if name in rows), None)


def natural_rows(found: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a file of `kvweave eval natural` with KV stored exactly, by recipe."""
    return {row["recipe"]: row for row in (found or {"rows": []})["rows"] if row["storage"] == "exact"}


def natural_place(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the model, the length and the ratio of a row of natural text."""
    model, length = found["about"]["model"], f"{row['context_tokens']:,} tokens"
    return f"{model}, natural text, {length}, {row['prompts']} prompts, {row['ratio']:.0%}"
