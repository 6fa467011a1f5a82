"""Two runs of the same prompts, compared prompt by prompt. Knows outcomes, not what recipes are."""

from collections.abc import Iterable

from kvweave.evaluation.results import Estimate, Label, Outcome
from kvweave.evaluation.statistics import interval_over_tasks


def difference(outcomes: Iterable[Outcome], mine: Label, theirs: Label) -> Estimate | None:
    """How much higher `mine` scores than `theirs`: the mean over tasks, of the prompts that both ran on.

    Resampled as differences, so that a prompt's two scores stay together; None where no prompt has both.
    """
    scores: dict[Label, dict[tuple[str, str], float]] = {mine: {}, theirs: {}}
    for outcome in outcomes:
        if outcome.label in scores:
            scores[outcome.label][outcome.task, outcome.sample] = outcome.score
    tasks: dict[str, list[float]] = {}
    for place, score in scores[mine].items():
        if place in scores[theirs]:
            tasks.setdefault(place[0], []).append(score - scores[theirs][place])
    return interval_over_tasks(list(tasks.values())) if tasks else None
