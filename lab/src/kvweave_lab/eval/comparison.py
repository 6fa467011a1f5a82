"""Two runs of the same prompts, compared prompt by prompt. Knows outcomes, not what recipes are."""

from collections.abc import Iterable, Sequence

from kvweave_lab.eval.results import Estimate, Label, Outcome
from kvweave_lab.eval.statistics import interval_over_tasks


def difference(outcomes: Iterable[Outcome], mine: Label, theirs: Label) -> Estimate | None:
    """How much higher `mine` scores than `theirs`: the mean over tasks, of the prompts that both ran on.

    Resampled as differences, so that a prompt's two scores stay together; None where no prompt has both.
    """
    return mean_difference(outcomes, [(mine, theirs)])


def mean_difference(outcomes: Iterable[Outcome], pairs: Sequence[tuple[Label, Label]]) -> Estimate | None:
    """The same on the mean over several pairs, prompt by prompt; of the prompts that all of them ran on."""
    scores: dict[tuple[str, str], dict[Label, float]] = {}
    for outcome in outcomes:
        scores.setdefault((outcome.task, outcome.sample), {})[outcome.label] = outcome.score
    wanted = {label for pair in pairs for label in pair}
    tasks: dict[str, list[float]] = {}
    for (task, _), found in scores.items():
        if wanted <= found.keys():
            gains = [found[mine] - found[theirs] for mine, theirs in pairs]
            tasks.setdefault(task, []).append(sum(gains) / len(gains))
    return interval_over_tasks(list(tasks.values())) if tasks else None
