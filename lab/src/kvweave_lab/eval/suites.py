"""What `kvweave eval` runs when nothing else is asked for: named sets of tasks, lengths, recipes and ratios."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import METHODS, PREPARATIONS
from kvweave.recipes.prepare import NotPrepared
from kvweave_lab.eval.results import REUSE
from kvweave_lab.eval.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Suite:
    """A grid of runs.

    Attributes:
        tasks: task names.
        context_tokens: context lengths in tokens.
        chunk_tokens: largest chunk.
        recipes: recipe names; full attention always runs beside them.
        ratios: shares of stale context tokens to recompute, for recipes that select.
        seeds: each gives samples of its own.
        samples: prompts per task, length and seed.
        coverages: shares of all scores to recompute, for recipes whose scores add up.
        preparations: names of those to run every recipe on; none for each recipe's own.
        storages: how prepared KV is stored; with another one than exact, each recipe runs exact as well.
        auxiliary: the model that recipes with an auxiliary model read with; None is the shipped one.
    """

    tasks: tuple[str, ...]
    context_tokens: tuple[int, ...]
    chunk_tokens: int
    recipes: tuple[str, ...]
    ratios: tuple[float, ...]
    seeds: tuple[int, ...]
    samples: int
    coverages: tuple[float, ...] = ()
    preparations: tuple[str, ...] = ()
    storages: tuple[str, ...] = ("exact",)
    auxiliary: str | None = None


_RECIPES = tuple(name for name in METHODS if name not in ("full", "prefix", "percache"))

SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "quick": Suite(
            tasks=("single", "coref", "vartrack"),
            context_tokens=(512,),
            chunk_tokens=96,
            recipes=("naive", "direct", REUSE, "prophetkv", "weave"),
            ratios=(0.2,),
            seeds=(0,),
            samples=200,
        ),
        "full": Suite(
            tasks=tuple(TASKS),
            context_tokens=(512, 2048),
            chunk_tokens=96,
            recipes=_RECIPES,
            ratios=(0.0, 0.1, 0.2, 0.3, 0.5, 1.0),
            seeds=(0,),
            samples=200,
        ),
    }
)


def suite_named(name: str) -> Suite:
    """The suite a name stands for; raises InvalidRequest listing the names there are."""
    if name not in SUITES:
        raise InvalidRequest(f"there is no suite {name!r}; choose one of {', '.join(SUITES)}")
    return SUITES[name]


def selectors() -> tuple[str, ...]:
    """The recipes that combine with any preparation: all that select, and reuse, which recomputes nothing."""
    return (REUSE, *(name for name, make in METHODS.items() if make().select.selects))


def storable(recipes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of some recipes that prepare KV which may be stored in fewer bits."""
    prepared = {name: METHODS[name]().prepare for name in recipes}
    return tuple(name for name, how in prepared.items() if how != NotPrepared() and how.max_versions is None)


MATRIX_RATIO = 0.15
"""Where FusionRAG compares preparations (§5.3.1)."""


def matrix_of(suite: Suite) -> Suite:
    """The suite's prompts, answered by every selector on every preparation at one ratio."""
    return replace(
        suite,
        recipes=selectors(),
        ratios=(MATRIX_RATIO,),
        coverages=(),
        preparations=tuple(PREPARATIONS),
    )
