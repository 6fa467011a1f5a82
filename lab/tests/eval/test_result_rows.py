"""Rows of a table, worked out by hand from a handful of outcomes."""

import dataclasses

import pytest

from kvweave_lab.eval.rows import summary_rows
from lab_support.result_rows import outcome


def prompt(task, sample, full, reuse, scores, **more):
    """One prompt under full attention, reuse and a recipe at two ratios, recomputing 20 and 40 rows."""
    return [
        outcome(task, sample, "full", 1.0, full, **more),
        outcome(task, sample, "reuse", 0.0, reuse, **more),
        outcome(task, sample, "some", 0.4, scores[1], recomputed=40, selection=0.75, **more),
        outcome(task, sample, "some", 0.2, scores[0], recomputed=20, selection=0.5, **more),
    ]


@pytest.fixture
def outcomes():
    return [
        *prompt("twohop", 0, 1.0, 0.0, (0.0, 1.0)),
        *prompt("twohop", 1, 1.0, 0.5, (0.5, 0.75)),
        *prompt("coref", 0, 0.9, 0.7, (0.75, 0.9)),
        *prompt("order", 0, 0.5, 0.5, (0.5, 0.5)),
    ]


def one(made, task, recipe, ratio, context_tokens=512):
    found = [
        row
        for row in made
        if (row.task, row.recipe, row.ratio, row.context_tokens) == (task, recipe, ratio, context_tokens)
    ]
    assert len(found) == 1
    return found[0]


def test_a_row_has_the_means_over_its_prompts_and_of_both_baselines(outcomes):
    row = one(summary_rows(outcomes), "twohop", "some", 0.4)
    assert row.samples == 2
    assert row.score.value == pytest.approx(0.875)
    assert row.full_score.value == 1.0
    assert row.reuse_score.value == pytest.approx(0.25)
    assert row.agreement.value == 0.5
    assert row.kl.value == pytest.approx(0.125)
    assert row.faithfulness.value == pytest.approx(0.4375)
    assert (row.rows.value, row.selection.value) == (40, 0.75)
    assert row.score.low <= row.score.value <= row.score.high


def test_normalised_is_the_restored_share_of_the_gain(outcomes):
    made = summary_rows(outcomes)
    normalised = one(made, "twohop", "some", 0.4).normalised
    assert normalised is not None
    assert normalised.value == pytest.approx(0.625 / 0.75)
    assert one(made, "order", "some", 0.4).normalised is None  # full attention gains nothing
    assert one(made, "twohop", "full", 1.0).normalised.value == 1.0
    assert one(made, "twohop", "reuse", 0.0).normalised.value == 0.0


def test_overall_is_the_mean_over_tasks_and_its_ratio_that_of_means(outcomes):
    row = one(summary_rows(outcomes), "overall", "some", 0.2)
    assert row.samples == 4
    assert row.score.value == pytest.approx((0.25 + 0.75 + 0.5) / 3)
    assert row.full_score.value == pytest.approx((1.0 + 0.9 + 0.5) / 3)
    assert row.normalised is not None
    assert row.normalised.value == pytest.approx((0.0 + 0.05) / (0.75 + 0.2))  # order has no gain
    assert (row.rows.value, row.selection.value) == (20, 0.5)


def test_selection_is_the_mean_where_something_was_selected(outcomes):
    made = summary_rows([*outcomes, *prompt("single", 0, 1.0, 0.0, (0.0, 1.0))[:2]])
    assert one(made, "twohop", "reuse", 0.0).selection is None
    mixed = [
        *prompt("single", 0, 1.0, 0.0, (0.0, 1.0)),
        outcome("single", 1, "full", 1.0, 1.0),
        outcome("single", 1, "reuse", 0.0, 1.0),
        outcome("single", 1, "some", 0.2, 1.0),
    ]
    assert one(summary_rows(mixed), "single", "some", 0.2).selection.value == 0.5


def test_computed_rows_and_selection_have_intervals(outcomes):
    more = [
        outcome("single", number, *what)
        for number in range(8)
        for what in (("full", 1.0, 1.0), ("reuse", 0.0, 0.0))
    ]
    varied = [
        outcome("single", number, "some", 0.2, 0.5, recomputed=10 * number, selection=number / 8)
        for number in range(8)
    ]
    row = one(summary_rows([*more, *varied]), "single", "some", 0.2)
    assert 10 < row.rows.low < row.rows.value == 35 < row.rows.high < 60
    assert row.selection.low < row.selection.value < row.selection.high


def test_losses_are_paired_prompt_by_prompt():
    """Every prompt loses 0.25, however unlike the prompts are: no resample knows anything else."""
    made = summary_rows(
        [each for n in range(9) for each in prompt("single", n, n / 9 + 0.25, n / 9, (n / 9, n / 9 + 0.25))]
    )
    lost, reuse = (one(made, "single", *which).lost for which in (("some", 0.2), ("reuse", 0.0)))
    assert (lost.value, lost.low, lost.high) == pytest.approx((0.25, 0.25, 0.25))
    assert lost == reuse
    assert one(made, "single", "full", 1.0).lost.high == 0
    score = one(made, "single", "some", 0.2).score
    assert score.high - score.low > 0.1


def test_rows_are_ordered_by_length_task_recipe_and_ratio(outcomes):
    longer = prompt("twohop", 0, 1.0, 0.0, (0.0, 1.0), context_tokens=2048)
    order = [
        (row.context_tokens, row.task, row.recipe, row.ratio) for row in summary_rows([*longer, *outcomes])
    ]
    runs = [("full", 1.0), ("reuse", 0.0), ("some", 0.2), ("some", 0.4)]
    expected = [(512, task, *run) for task in ("twohop", "coref", "order", "overall") for run in runs]
    assert order == expected + [(2048, task, *run) for task in ("twohop", "overall") for run in runs]


def test_a_length_is_compared_with_its_own_baselines(outcomes):
    made = summary_rows([*outcomes, *prompt("twohop", 0, 0.5, 0.25, (0.25, 0.5), context_tokens=2048)])
    assert one(made, "twohop", "some", 0.2, 2048).full_score.value == 0.5
    assert one(made, "twohop", "some", 0.2).full_score.value == 1.0


def test_reuse_with_recomputing_is_no_baseline(outcomes):
    made = summary_rows([*outcomes, outcome("twohop", 0, "reuse", 1.0, 1.0)])
    assert one(made, "twohop", "some", 0.4).reuse_score.value == pytest.approx(0.25)


def test_a_coverage_has_its_own_row_after_the_ratios(outcomes):
    covering = [
        dataclasses.replace(outcome, ratio=None, coverage=0.1, score=1.0)
        for outcome in outcomes
        if (outcome.recipe, outcome.ratio) == ("some", 0.2)
    ]
    here = [
        row for row in summary_rows([*covering, *outcomes]) if (row.task, row.recipe) == ("overall", "some")
    ]
    assert [(row.ratio, row.coverage) for row in here] == [(0.2, None), (0.4, None), (None, 0.1)]
    assert [(row.series, row.budget) for row in here[1:]] == [("some", 0.4), ("some by coverage", 0.1)]
    assert here[2].score.value == 1.0
    assert here[2].rows.value == 20  # the rows that were really computed


@pytest.mark.parametrize("missing", ["full", "reuse"])
def test_a_sample_without_a_baseline_is_our_own_mistake(outcomes, missing):
    with pytest.raises(AssertionError, match=missing):
        summary_rows([outcome for outcome in outcomes if outcome.recipe != missing])
