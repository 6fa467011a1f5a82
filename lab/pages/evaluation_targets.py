"""What the shipped models are meant to reach on the evaluation's tasks, and how far they come."""

from collections.abc import Mapping, Sequence
from typing import Any

from baselines import Cells, baseline_cells
from tables import NOT_MEASURED, header, row

from kvweave_lab.eval.results import FULL
from kvweave_lab.eval.summary import OVERALL

Result = Mapping[str, Any]

LENGTHS = (512, 2048)
SURE = ("single", "multikey", "twohop", "coref")
NAMED = ("multivalue", "multiquery", "vartrack", "contradiction", "order")
DEPENDENT = ("coref", "twohop", "vartrack", "contradiction", "order")
"""Tasks in which chunks depend on one another."""

LEAST_SURE, LEAST, TASKS = 0.95, 0.85, 9
FALL, FALLING = 0.25, 3
MOST_BYTES = 20_000_000
EXACT_KL = 1e-6


def targets(quality: Result | None, selection: Result | None, second: Result | None = None) -> str:
    """A line for each target and length; `second` is what a second training run scored."""
    if quality is None:
        return NOT_MEASURED
    lines = [*header("aimed at", "context", "reached", "measured")]
    cells = baseline_cells(quality)
    for length in LENGTHS:
        full, reuse = (_scores(cells, length, recipe) for recipe in ("full", "reuse"))
        if not full:
            continue
        for tasks, least in ((SURE, LEAST_SURE), (NAMED, LEAST)):
            said = f"at least {least:.2f} on {_listed(tasks)}"
            lines.append(_told(said, length, all(full.get(task, 0) >= least for task in tasks), tasks, full))
        enough = [task for task, score in full.items() if score >= LEAST]
        lines.append(
            row(
                f"at least {LEAST:.2f} on {TASKS} of all tasks",
                f"{length:,}",
                _yes(len(enough) >= TASKS),
                f"{len(enough)} of {len(full)}",
            )
        )
        falls = {task: full[task] - reuse[task] for task in DEPENDENT if task in full and task in reuse}
        lines.append(
            _told(
                f"`reuse` falls by at least {FALL:.2f} on {FALLING} of {_listed(DEPENDENT)}",
                length,
                sum(fall >= FALL for fall in falls.values()) >= FALLING,
                tuple(falls),
                falls,
            )
        )
        whole = [one for one in _recomputed_whole(quality) if one["context_tokens"] == length]
        if whole:
            exact = all(one["agreement"] == 1 and one["kl"] < EXACT_KL for one in whole)
            recipes = _listed(sorted({one["recipe"] for one in whole}))
            measured = f"every answer equal, KL below {EXACT_KL:g}" if exact else "not every answer equal"
            lines.append(
                row(
                    "recomputing 100 % restores full attention",
                    f"{length:,}",
                    _yes(exact),
                    f"{recipes}: {measured}",
                )
            )
    size = quality["reference"]["bytes"]
    lines.append(row("weights of at most 20 MB", "", _yes(size <= MOST_BYTES), f"{size / 1e6:.1f} MB"))
    auxiliary = (selection or {}).get("auxiliary")
    if auxiliary:
        kl, jaccard = auxiliary["kl_difference"], auxiliary["jaccard_difference"]
        lines.append(
            row(
                "the auxiliary model foresees the last layer better than the first layer does",
                f"{selection['context_tokens']:.0f}" if selection else "",
                _yes(kl["high"] < 0 < jaccard["low"]),
                f"KL {kl['value']:+.2f}, Jaccard {jaccard['value']:+.3f} ([selection](selection.md#the-auxiliary-model))",
            )
        )
    if second:
        lines.append(_second_run(second["rows"]))
    return "\n".join(lines)


def _recomputed_whole(quality: Result) -> list[Result]:
    """The rows in which a recipe other than full attention recomputed all tokens."""
    return [one for one in quality["rows"] if one["ratio"] == 1 and one["recipe"] != FULL]


def repeated(one: Result) -> bool:
    """Whether a second training run's score lies in the first one's interval."""
    _, low, high = one["first"]
    return bool(low <= one["second"][0] <= high)


def _second_run(rows: Sequence[Result]) -> str:
    inside = [one for one in rows if repeated(one)]
    lengths = ", ".join(f"{length:,}" for length in sorted({one["context_tokens"] for one in rows}))
    return row(
        "a second training run scores within the first one's interval",
        lengths,
        _yes(len(inside) == len(rows)),
        f"{len(inside)} of {len(rows)}, its last stage run again ([training](../training/README.md#a-second-run))",
    )


def _scores(cells: Cells, length: int, recipe: str) -> dict[str, float]:
    """By task."""
    return {
        task: one["score"]
        for (tokens, task, name), one in cells.items()
        if (tokens, name) == (length, recipe) and task != OVERALL
    }


def _told(said: str, length: int, reached: bool, tasks: Sequence[str], scores: Mapping[str, float]) -> str:
    measured = ", ".join(f"{scores[task]:.3f}" if task in scores else "–" for task in tasks)
    return row(said, f"{length:,}", _yes(reached), measured)


def _listed(tasks: Sequence[str]) -> str:
    return ", ".join(f"`{task}`" for task in tasks)


def _yes(reached: bool) -> str:
    return "yes" if reached else "**no**"
