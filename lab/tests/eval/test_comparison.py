"""Two runs of the same prompts are compared prompt by prompt."""

from dataclasses import replace

import pytest
from test_journal import OUTCOME

from kvweave_lab.eval.comparison import difference, mean_difference
from kvweave_lab.eval.statistics import interval_over_tasks

MINE, THEIRS = ("mine", 0.1, None), ("theirs", 0.1, None)


def outcome(label, task, sample, score):
    recipe, ratio, coverage = label
    return replace(
        OUTCOME,
        task=task,
        sample=f"{task}/{sample}",
        recipe=recipe,
        ratio=ratio,
        coverage=coverage,
        score=score,
    )


def test_it_is_the_mean_over_tasks_of_paired_differences():
    # one task of two prompts, one of one: a mean over prompts would give (0.5 + 0 + 0.2) / 3
    scores = {("a", 0): (1.0, 0.5), ("a", 1): (0.3, 0.3), ("b", 0): (0.4, 0.2)}
    outcomes = [
        outcome(label, *place, score)
        for place, pair in scores.items()
        for label, score in zip((MINE, THEIRS), pair, strict=True)
    ]
    found = difference(outcomes, MINE, THEIRS)
    assert found.value == pytest.approx((0.25 + 0.2) / 2)
    assert found == interval_over_tasks([[0.5, 0.0], [0.4 - 0.2]])
    assert difference(outcomes, THEIRS, MINE).value == pytest.approx(-found.value)


def test_prompts_that_only_one_ran_on_do_not_count():
    outcomes = [outcome(MINE, "a", 0, 1.0), outcome(THEIRS, "a", 0, 0.5), outcome(MINE, "a", 1, 0.0)]
    assert difference(outcomes, MINE, THEIRS).value == 0.5
    assert difference(outcomes[:1], MINE, THEIRS) is None


def test_another_budget_of_the_same_recipe_does_not_count():
    other = ("theirs", 0.2, None)
    outcomes = [outcome(MINE, "a", 0, 1.0), outcome(THEIRS, "a", 0, 0.5), outcome(other, "a", 0, 0.9)]
    assert difference(outcomes, MINE, THEIRS).value == 0.5
    assert difference(outcomes, MINE, other).value == pytest.approx(0.1)


def test_several_pairs_are_averaged_prompt_by_prompt():
    other = ("mine", 0.5, None)
    scores = {0: (1.0, 0.25, 0.5), 1: (0.0, 0.5, 0.75), 2: (1.0, None, 0.0)}
    outcomes = [
        outcome(label, "a", sample, score)
        for sample, given in scores.items()
        for label, score in zip((MINE, other, THEIRS), given, strict=True)
        if score is not None
    ]
    found = mean_difference(outcomes, [(MINE, THEIRS), (other, THEIRS)])
    assert found == interval_over_tasks([[(0.5 - 0.25) / 2, (-0.75 - 0.25) / 2]])  # the third lacks a run
    assert mean_difference(outcomes, [(MINE, ("none", 0.1, None))]) is None
