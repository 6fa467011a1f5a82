"""Full attention and the recipes that recompute nothing, in what `lab/experiments/quality.py` left."""

from collections.abc import Mapping
from typing import Any

from tables import between

from kvweave_lab.eval.summary import OVERALL

BASELINES = {"full": 1.0, "naive": 0.0, "direct": 0.0, "reuse": 0.0}
"""The recipes, each with its ratio, that stand in these tables; others have pages of their own."""

Cells = Mapping[tuple[int, str, str], Mapping[str, Any]]
"""Rows by length, task and recipe, in the order of the results."""


def baseline_cells(result: Mapping[str, Any]) -> Cells:
    return {
        (one["context_tokens"], one["task"], one["recipe"]): one
        for one in result["rows"]
        if one["recipe"] in BASELINES and one["ratio"] == BASELINES[one["recipe"]]
    }


def score(cells: Cells, length: int, task: str, recipe: str) -> str:
    """With its interval; nothing for a mean that is not over the prompts that full attention's is over."""
    found = cells.get((length, task, recipe))
    if found is None or found["samples"] != cells[length, task, "full"]["samples"]:
        return "–"
    return between(found["score"], *found["score_interval"])


def lengths(cells: Cells) -> list[int]:
    return sorted({length for length, _, _ in cells})


def prompts(cells: Cells) -> str:
    counts = {found["samples"] for (_, task, _), found in cells.items() if task != OVERALL}
    return f"{' to '.join(f'{count:,}' for count in sorted({min(counts), max(counts)}))} prompts"
