"""What lab/docs/ttft.md aims at, and how far the measurements beside it come."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tables import NOT_MEASURED, header, row

Row = Mapping[str, Any]
RECIPES = ("prophetkv", "weave")


@dataclass(frozen=True, slots=True)
class Target:
    """`value` of every row at these contexts and ratios is at least, or at most, `bound`."""

    said: str
    contexts: Callable[[int], bool]
    ratios: tuple[float, ...]
    value: Callable[[Row], float]
    bound: float
    at_least: bool
    form: str

    def holds(self, one: Row) -> bool:
        """Whether the row reaches it."""
        found = self.value(one)
        return found >= self.bound if self.at_least else found <= self.bound

    def told(self, one: Row) -> str:
        """The row's value."""
        return format(self.value(one), self.form)


def _efficiency(one: Row) -> float:
    return float(one["efficiency"])


def _speedup(one: Row) -> float:
    return float(one["speedup"])


def _of_full(one: Row) -> float:
    return 1 / float(one["speedup"])


SHORT: Callable[[int], bool] = lambda tokens: tokens == 4096  # noqa: E731
LONG: Callable[[int], bool] = lambda tokens: tokens >= 8192  # noqa: E731

TARGETS = (
    Target("efficiency at least 0.75 at 4K, ratio 0.1", SHORT, (0.1,), _efficiency, 0.75, True, ".2f"),
    Target(
        "efficiency at least 0.85 at 4K, ratios 0.15 to 0.3",
        SHORT,
        (0.15, 0.2, 0.3),
        _efficiency,
        0.85,
        True,
        ".2f",
    ),
    Target(
        "efficiency at least 0.90 from 8K on, ratios 0.1 to 0.3",
        LONG,
        (0.1, 0.15, 0.2, 0.3),
        _efficiency,
        0.90,
        True,
        ".3f",
    ),
    Target("at least 5.5× at ratio 0.15 from 8K on", LONG, (0.15,), _speedup, 5.5, True, ".2f"),
    Target("at least 4.3× at ratio 0.2 from 8K on", LONG, (0.2,), _speedup, 4.3, True, ".2f"),
    Target("ratio 0 at most 0.03 of full prefill at 4K", SHORT, (0.0,), _of_full, 0.03, False, ".3f"),
    Target("ratio 1 at most 1.02 of full prefill at 4K", SHORT, (1.0,), _of_full, 1.02, False, ".3f"),
)


def targets(measured: Iterable[Mapping[str, Any] | None]) -> str:
    """A line for each, over all rows of RECIPES that had their KV in memory."""
    rows = [
        one
        for told in measured
        if told is not None
        for one in told["rows"]
        if one["recipe"] in RECIPES and one["kv_from"] == "memory"
    ]
    if not rows:
        return NOT_MEASURED
    lines = header("aimed at", "measured", "reached", "missed by")
    for target in TARGETS:
        own = [
            one for one in rows if target.contexts(one["context_tokens"]) and one["ratio"] in target.ratios
        ]
        missed = [one for one in own if not target.holds(one)]
        values = sorted(map(target.value, own))
        lines.append(
            row(
                target.said,
                " to ".join(format(value, target.form) for value in (values[0], values[-1]))
                if own
                else "not measured",
                f"{len(own) - len(missed)} of {len(own)}",
                "; ".join(
                    f"`{one['recipe']}` at {one['ratio']:g} over {one['context_tokens']:,}: {target.told(one)}"
                    for one in missed
                ),
            )
        )
    return "\n".join(lines)
