"""Recipes whose stale KV moves as in `weave-shifted`, with other selections and isolated chunks."""

from dataclasses import replace

from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import TopScores
from kvweave.recipes.shift import ShiftedRows


def prophetkv() -> Recipe:
    """`prophetkv`, and the rest of each chunk is shifted by the mean movement of its recomputed rows.

    Paper: ProphetKV (arXiv 2602.02579) for the selection; the shift is in none.
    Idea: as `weave-shifted`.
    Parameters: as `prophetkv`.
    Differs from the paper: the shift.
    Relations: `weave-shifted`.
    """
    return _shifted("prophetkv")


def cacheblend() -> Recipe:
    """`cacheblend`, and the rest of each chunk is shifted by the mean movement of its recomputed rows.

    Paper: CacheBlend (arXiv 2405.16444) for the selection; the shift is in none.
    Idea: as `weave-shifted`.
    Parameters: as `cacheblend`.
    Differs from the paper: the shift.
    Relations: `weave-shifted`.
    """
    return _shifted("cacheblend")


def _shifted(method: str) -> Recipe:
    own = recipe_named(method)
    assert isinstance(own.select, TopScores)
    select = TopScores(own.select.score, sampled=0.25)
    return replace(own, name=f"{method}-shifted", select=select, recompute=ShiftedRows())
