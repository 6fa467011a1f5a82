"""What each storage costs each recipe, for a terminal and for programs."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvweave_lab.eval.quantisation import StorageCost
from kvweave_lab.eval.report import slices
from kvweave_lab.eval.results import Estimate


def storage_table(costs: Sequence[StorageCost]) -> Table:
    """A line for each length, recipe, budget and storage."""
    shown = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        header_style="bold",
        title="chunk KV in fewer bits",
        title_justify="left",
        caption="± half of the 95 % interval · lost: by this storage, on the same prompts · same: equal answers",
        caption_justify="left",
    )
    shown.add_column("recipe", overflow="fold")
    for name in ("tokens", "budget", "storage", "samples", "exact", "score", "lost", "same"):
        shown.add_column(name, no_wrap=True, justify="right")
    for cost in costs:
        budget = cost.ratio if cost.coverage is None else cost.coverage
        shown.add_row(
            escape(cost.recipe),
            f"{cost.context_tokens:,}" if cost.context_tokens else "file",
            f"{budget:g}" + ("" if cost.coverage is None else " cov."),
            cost.storage,
            f"{cost.samples:,}",
            f"{cost.exact_score.value:.3f}",
            f"{cost.score.value:.3f}",
            f"{cost.lost.value:+.4f} ±{slices.margin(cost.lost):.4f}",
            f"{cost.same.value:.3f}",
        )
    return shown


def storages_json(costs: Sequence[StorageCost]) -> list[dict[str, Any]]:
    """Plain values: an estimate is a number under its name and [low, high] under its name with `_interval`."""
    return [_plain(cost) for cost in costs]


def _plain(cost: StorageCost) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for field in fields(StorageCost):
        value = getattr(cost, field.name)
        if isinstance(value, Estimate):
            plain |= {field.name: value.value, f"{field.name}_interval": [value.low, value.high]}
        else:
            plain[field.name] = value
    return plain
