"""Recipe × ratio × task × seed: which samples go through which candidates."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvweave.errors import InvalidRequest
from kvweave.evaluation.haystack import Haystack
from kvweave.evaluation.results import FULL, REUSE, Outcome
from kvweave.evaluation.runner import Candidate, Runner
from kvweave.evaluation.samples import Sample, Setting, generate
from kvweave.evaluation.suites import Suite
from kvweave.evaluation.tasks import TASKS
from kvweave.recipes.methods import recipe_named

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


def candidates(recipes: Sequence[str], ratios: Sequence[float]) -> list[Candidate]:
    """Every recipe at every ratio that means something to it; `reuse` at 0 is always among them.

    A recipe that recomputes nothing runs at 0, and at 1 if that was asked for; full attention needs no candidate.
    """
    chosen: dict[tuple[str, float], Candidate] = {}
    for name in dict.fromkeys((REUSE, *recipes)):
        if name == FULL:
            continue
        recipe = recipe_named(name)
        asked = ratios if recipe.select.selects else [0.0, *(ratio for ratio in ratios if ratio == 1)]
        for ratio in (0.0, *asked) if name == REUSE else asked:
            candidate = Candidate(recipe, float(ratio))
            chosen[candidate.label] = candidate
    return list(chosen.values())


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
