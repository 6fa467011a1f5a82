"""Rows about single figures and tables of papers: the claim of a figure, and whether the results here agree with it.

Whether a claim held is computed from the results. Rows that cannot be measured here give the reason.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

Results = Callable[[str], Mapping[str, Any] | None]
"""Returns a file of lab/results by its name without ending, or None if it does not exist."""


class Seen(NamedTuple):
    """An observation: `held` is True or False if the interval decides, None if it does not or if the gain is smaller."""

    held: bool | None
    where: str
    numbers: str
    label: str = ""  # in words, if the points of a figure differ


Measure = Callable[[Results], Seen | None]
"""Returns an observation, or None without results."""


class Figure(NamedTuple):
    """A figure or table of a paper: its name, its claim, and a measure or the reason why there is no measure here.

    Without a measure, `unmeasured` says whether it cannot be measured here or only was not.
    """

    name: str
    says: str
    seen: Measure | str
    unmeasured: str = "not measurable here"


NOT_MEASURED = "not measured"
"""Marks a figure that could be measured here."""


class Number(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


def number(content: Mapping[str, Any], name: str | None = None) -> Number:
    """Return a number of a result with its interval, which is in `low` and `high` or in `<name>_interval`."""
    if name is None:
        return Number(content["value"], content["low"], content["high"])
    return Number(content[name], *content[f"{name}_interval"])


def shown(value: Number, form: str = ".3f") -> str:
    return f"{value.value:{form}} ({value.low:{form}} to {value.high:{form}})"


def above(first: Number, second: Number | float) -> bool | None:
    """Return whether the first number is larger, or None if the intervals overlap."""
    other = second if isinstance(second, Number) else Number(second, second, second)
    return True if first.low > other.high else False if first.high < other.low else None


def reaches(value: float, least: float, even: float = 1.0) -> bool | None:
    """Return True if a gain reaches the paper's, None if it is smaller, False if there is none."""
    return True if value >= least else None if value > even else False


def together(points: Iterable[bool | None]) -> bool | None:
    """Return False if any point was contradicted, True if all held, else None."""
    found = list(points)
    return False if False in found else None if None in found else True


NOT_JUDGED = "not judged"
"""Marks numbers that neither support nor contradict the claim, because of how they were measured."""


def without_verdict(seen: Seen, *reasons: str) -> Seen:
    """Return the observation without its verdict and with the reasons, or unchanged if all reasons are empty."""
    given = "; ".join(filter(None, reasons))
    if not given:
        return seen
    return seen._replace(held=None, numbers=f"{seen.numbers}. No verdict: {given}", label=NOT_JUDGED)


def single(count: int, unit: str) -> str:
    """Return the reason why a measurement of a single user, text or head has no verdict, or nothing if there are more."""
    return f"it is one {unit}" if count == 1 else ""


REFERENCE = "shipped 10 MB model"
LONGER = "10 MB model for longer texts"

_RESTS_ON = {
    "10 MB model": "a 10 MB model alone, which was trained here",
    "gemma-3-270m": "Gemma 3 270M alone",
    "shape of": "times in the shape of a model, with random weights",
}


def rests_on(where: str) -> str:
    """Return the kind of model that an observation rests on, by the words of its place."""
    return next((kind for words, kind in _RESTS_ON.items() if words in where), "no language model")


def claim(name: str, *kinds: str) -> Measure:
    """Return a measure of the points of an experiment of `lab/experiments/papers/` whose statements contain one of the words."""

    def seen(results: Results) -> Seen | None:
        from papers import CLAIMS

        measured = (results("claims") or {}).get("claims", {}).get(name)
        if measured is None:
            return None
        verdicts = [one for one in CLAIMS[name].verdicts(measured) if _any_of(one.statement, kinds)]
        points = [one.held for one in verdicts]
        where = f"{REFERENCE}, 512 tokens, {measured['prompts']} prompts of a task"
        numbers = f"{len(points)} points: see [below](#{_anchor(name)})"
        unjudged = sum(not one.judged for one in verdicts)
        label = in_words([one.held for one in verdicts if one.judged], unjudged)
        return Seen(together(points), where, numbers, label)

    return seen


def in_words(points: list[bool | None], unjudged: int = 0) -> str:
    """Return how many points held, were not seen, and were contradicted, and how many have no verdict."""
    words = {True: "held", None: "not seen", False: "the opposite"}
    counts = [f"{word} {points.count(held)}" for held, word in words.items() if held in points]
    return ", ".join([*counts, *([f"{NOT_JUDGED} {unjudged}"] if unjudged else [])])


def _any_of(statement: str, kinds: tuple[str, ...]) -> bool:
    return not kinds or any(kind in statement for kind in kinds)


def _anchor(name: str) -> str:
    from papers import CLAIMS

    return CLAIMS[name].title.lower().replace(" ", "-")


def score_rows(results: Results, file: str, task: str, ratio: float) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a file of scores by recipe, for a task and a ratio, with full attention and plain reuse."""
    rows = (results(file) or {"rows": []})["rows"]
    return {
        row["recipe"]: row
        for row in rows
        if row["task"] == task and (row["ratio"] == ratio or row["recipe"] in ("full", "reuse"))
    }


def present(rows: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of some recipes that was measured; a method's current variant comes before an earlier one."""
    return next((name for name in names if name in rows), None)


def natural_rows(found: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a result of `kvweave eval natural` by recipe, with KV stored exactly."""
    return {row["recipe"]: row for row in (found or {"rows": []})["rows"] if row["storage"] == "exact"}


def natural_place(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return the model, the length and the ratio of a row of natural text."""
    model, length = found["about"]["model"], f"{row['context_tokens']:,} tokens"
    return f"{model}, natural text, {length}, {row['prompts']} prompts, {row['ratio']:.0%}"
