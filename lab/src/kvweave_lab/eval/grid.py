"""Recipe × budget × task × seed: which samples go through which candidates."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvweave.errors import InvalidRequest
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import Recipe
from kvweave_lab.eval.haystack import Haystack
from kvweave_lab.eval.results import FULL, REUSE, Label, Outcome
from kvweave_lab.eval.runner import Candidate, Runner
from kvweave_lab.eval.samples import Sample, Setting, generate
from kvweave_lab.eval.suites import Suite
from kvweave_lab.eval.tasks import TASKS

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, how much of it is done, and how much there is."""


class Case(NamedTuple):
    """A sample, the length it was made for (0 if it comes from a file), and its seed."""

    sample: Sample
    context_tokens: int
    seed: int


def generated_cases(
    suite: Suite, split: str, haystack: Haystack, count: Callable[[str], int]
) -> Iterator[Case]:
    """The samples of a suite: lengths outermost, then tasks, then seeds; what is named twice counts once.

    Raises InvalidRequest for a task that there is not, and for a context too short for one.
    """
    for task in suite.tasks:
        if task not in TASKS:
            raise InvalidRequest(f"there is no task {task!r}; choose from {', '.join(TASKS)}")
    for context_tokens in dict.fromkeys(suite.context_tokens):
        for task in dict.fromkeys(suite.tasks):
            for seed in dict.fromkeys(suite.seeds):
                setting = Setting(split, seed, context_tokens, suite.chunk_tokens)
                for sample in generate(task, setting, suite.samples, count, haystack):
                    yield Case(sample, context_tokens, seed)


def candidates(suite: Suite) -> list[Candidate]:
    """Every recipe with every budget that means something to it; `reuse` at ratio 0 is always among them.

    A recipe that recomputes nothing runs at ratio 0, and at 1 if that was asked for; full attention needs no candidate.
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
    """The ratios and the coverages that a recipe runs with."""
    if recipe.select.selects:
        ratios = list(suite.ratios)
    else:
        ratios = [0.0, *(ratio for ratio in suite.ratios if ratio == 1)]
    return [float(ratio) for ratio in ratios], list(suite.coverages) if recipe.select.adds_up else []


def _recipes(suite: Suite) -> list[Recipe]:
    """With all preparations and storages.

    Raises UnknownRecipe, and InvalidRequest for one that cannot be prepared or stored otherwise.
    """
    names = [name for name in dict.fromkeys(suite.recipes) if name != FULL]
    asked = [
        recipe_named(name, prepare, suite.auxiliary, storage)
        for name in names
        for prepare in suite.preparations or (None,)
        for storage in dict.fromkeys(("exact", *suite.storages))
    ]
    return [recipe_named(REUSE), *asked]


def evaluate(
    cases: Iterable[Case],
    total: int,
    among: Sequence[Candidate],
    runner: Runner,
    progress: Progress = lambda stage, done, of: None,
) -> list[Outcome]:
    """All outcomes, in the order of the cases; what the journal holds already is not run again.

    Raises PromptTooLong naming the sample when a prompt does not fit the model.
    """
    outcomes: list[Outcome] = []
    for done, case in enumerate(cases, 1):
        outcomes += runner.outcomes(case.sample, among, case.context_tokens, case.seed)
        progress("prompts", done, total)
    return outcomes
