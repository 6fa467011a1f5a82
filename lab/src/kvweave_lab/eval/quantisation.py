"""What storing chunk KV in fewer bits costs: every recipe beside itself with exact storage, prompt by prompt."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvweave.recipes.methods import with_exact_storage
from kvweave.types import Storage
from kvweave_lab.eval.results import Estimate, Label, Outcome
from kvweave_lab.eval.statistics import interval_over_tasks


@dataclass(frozen=True, slots=True)
class StorageCost:
    """One recipe with one budget and one storage, over all tasks of one length.

    Attributes:
        context_tokens: the length; 0 for samples from files.
        recipe: its name with exact storage.
        ratio: the budget, or None where it is a coverage.
        coverage: the other way round.
        storage: int8 or int4.
        samples: prompts.
        exact_score: mean over tasks, with exact storage.
        score: with this one.
        lost: exact_score - score, resampled in pairs.
        same: share of the prompts on which both answer word for word alike.
    """

    context_tokens: int
    recipe: str
    ratio: float | None
    coverage: float | None
    storage: Storage
    samples: int
    exact_score: Estimate
    score: Estimate
    lost: Estimate
    same: Estimate


_Prompts = dict[str, dict[str, Outcome]]
"""Outcomes by task and sample."""


def storage_costs(outcomes: Iterable[Outcome]) -> list[StorageCost]:
    """A cost for each length, recipe, budget and storage that ran quantised and exact on the same prompts, in order."""
    cells: dict[tuple[int, Label], _Prompts] = {}
    for outcome in outcomes:
        cell = cells.setdefault((outcome.context_tokens, outcome.label), {})
        cell.setdefault(outcome.task, {})[outcome.sample] = outcome
    found = []
    for (context_tokens, (recipe, ratio, coverage)), mine in cells.items():
        plain, storage = with_exact_storage(recipe)
        theirs = cells.get((context_tokens, (plain, ratio, coverage)))
        if storage != "exact" and theirs is not None:
            found.append(_cost(context_tokens, (plain, ratio, coverage), storage, mine, theirs))
    return sorted(found, key=lambda cost: cost.context_tokens)


def _cost(
    context_tokens: int, label: Label, storage: Storage, mine: _Prompts, exact: _Prompts
) -> StorageCost:
    pairs = [[(exact[task][name], one) for name, one in own.items()] for task, own in mine.items()]
    recipe, ratio, coverage = label
    return StorageCost(
        context_tokens=context_tokens,
        recipe=recipe,
        ratio=ratio,
        coverage=coverage,
        storage=storage,
        samples=sum(map(len, pairs)),
        exact_score=interval_over_tasks([[before.score for before, _ in task] for task in pairs]),
        score=interval_over_tasks([[after.score for _, after in task] for task in pairs]),
        lost=interval_over_tasks([[before.score - after.score for before, after in task] for task in pairs]),
        same=interval_over_tasks(
            [[before.answer == after.answer for before, after in task] for task in pairs]
        ),
    )
