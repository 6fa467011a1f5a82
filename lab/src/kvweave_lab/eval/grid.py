"""What an evaluation runs: named suites, the samples that they generate, and the recipes with their budgets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import METHODS, PREPARATIONS, recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import Recipe
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.eval.outcomes import FULL, REUSE, Label, Outcome
from kvweave_lab.eval.runner import Candidate, Runner
from kvweave_lab.eval.samples import Sample, SampleSpec, generate
from kvweave_lab.eval.tasks import EVERY_TASK, TASKS
from kvweave_lab.eval.world import Haystack


@dataclass(frozen=True, slots=True)
class Suite:
    """A grid of runs.

    Attributes:
        tasks: task names.
        context_tokens: context lengths in tokens.
        chunk_tokens: largest chunk.
        recipes: recipe names; full attention always runs too.
        ratios: shares of stale context tokens to recompute, for recipes that select.
        seeds: each one generates other samples.
        samples: prompts per task, length and seed.
        coverages: shares of all scores to recompute, for recipes whose scores add up.
        preparations: names of those on which every recipe runs; if empty, each recipe has its own.
        storages: how prepared KV is stored; with another one than exact, each recipe runs exact as well.
        auxiliary: the model of recipes with an auxiliary model; None is the shipped one.
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


_RECIPES = tuple(name for name in METHODS if name not in ("full", "prefix"))

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
"""What `kvweave eval` runs where no option says otherwise, by name."""

MATRIX_RATIO = 0.15
"""The ratio at which FusionRAG compares preparations (§5.3.1)."""


def suite_named(name: str) -> Suite:
    """Return the suite with this name; raises InvalidRequest that lists the names."""
    if name not in SUITES:
        raise InvalidRequest(f"there is no suite {name!r}; choose one of {', '.join(SUITES)}")
    return SUITES[name]


def matrix_of(suite: Suite) -> Suite:
    """Return a suite with the same prompts and every selector on every preparation, at one ratio."""
    return replace(
        suite,
        recipes=selectors(),
        ratios=(MATRIX_RATIO,),
        coverages=(),
        preparations=tuple(PREPARATIONS),
    )


def selectors() -> tuple[str, ...]:
    """Return the recipes that run on any preparation: all that select, and reuse, which recomputes nothing."""
    return (REUSE, *(name for name, make in METHODS.items() if make().select.selective))


def storable(recipes: tuple[str, ...]) -> tuple[str, ...]:
    """Return those recipes whose prepared KV can be stored in fewer bits."""
    prepared = {name: METHODS[name]().prepare for name in recipes}
    return tuple(name for name, how in prepared.items() if how != NotPrepared() and how.max_versions is None)


class Case(NamedTuple):
    """A sample, the length for which it was generated (0 if it comes from a file), and its seed."""

    sample: Sample
    context_tokens: int
    seed: int


def generated_cases(
    suite: Suite, split: str, haystack: Haystack, count: Callable[[str], int]
) -> Iterator[Case]:
    """Yield the samples of a suite by length, then task, then seed; duplicates in the suite count once.

    Raises InvalidRequest for an unknown task, and for a context too short for a task.
    """
    for task in suite.tasks:
        if task not in EVERY_TASK:
            raise InvalidRequest(f"there is no task {task!r}; choose from {', '.join(EVERY_TASK)}")
    for context_tokens in dict.fromkeys(suite.context_tokens):
        for task in dict.fromkeys(suite.tasks):
            for seed in dict.fromkeys(suite.seeds):
                spec = SampleSpec(split, seed, context_tokens, suite.chunk_tokens)
                for sample in generate(task, spec, suite.samples, count, haystack):
                    yield Case(sample, context_tokens, seed)


def candidates_of(suite: Suite) -> list[Candidate]:
    """Return every recipe with every budget that applies to it; `reuse` at ratio 0 is always among them.

    A recipe that recomputes nothing runs at ratio 0, and at 1 if the suite has it. Full attention needs no candidate.
    Where the suite names preparations, every recipe runs on each of them instead of its own.
    """
    chosen: dict[Label, Candidate] = {}
    for recipe in _recipes(suite):
        ratios, coverages = budgets(recipe, suite)
        for candidate in (
            *(Candidate(recipe, ratio) for ratio in ratios),
            *(Candidate(recipe, None, coverage) for coverage in coverages),
        ):
            chosen.setdefault(candidate.label, candidate)
    return list(chosen.values())


def budgets(recipe: Recipe, suite: Suite) -> tuple[list[float], list[float]]:
    """Return the ratios and the coverages with which a recipe runs."""
    if recipe.select.selective:
        ratios = list(suite.ratios)
    else:
        ratios = [0.0, *(ratio for ratio in suite.ratios if ratio == 1)]
    return [float(ratio) for ratio in ratios], list(
        suite.coverages
    ) if recipe.select.supports_coverage else []


def _recipes(suite: Suite) -> list[Recipe]:
    """Return the recipes with all preparations and storages.

    Raises UnknownRecipe, and InvalidRequest for a recipe with a fixed preparation or storage.
    """
    names = [name for name in dict.fromkeys(suite.recipes) if name != FULL]
    recipes = [
        recipe_named(name, prepare, suite.auxiliary, storage)
        for name in names
        for prepare in suite.preparations or (None,)
        for storage in dict.fromkeys(("exact", *suite.storages))
    ]
    return [recipe_named(REUSE), *recipes]


def evaluate(
    cases: Iterable[Case],
    total: int,
    candidates: Sequence[Candidate],
    runner: Runner,
    progress: Progress = no_progress,
) -> list[Outcome]:
    """Return all outcomes, in the order of the cases; those in the runner's log are not computed again.

    Raises PromptTooLong that names the sample if a prompt is too long for the model.
    """
    outcomes: list[Outcome] = []
    for done, case in enumerate(cases, 1):
        outcomes += runner.outcomes(case.sample, candidates, case.context_tokens, case.seed)
        progress("prompts", done, total)
    return outcomes
