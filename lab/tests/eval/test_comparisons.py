"""Comparisons of runs on the same prompts, worked out by hand: preparations by selectors, two recipes, storages."""

import dataclasses
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from kvweave_lab.eval.comparisons import difference, matrices, mean_difference, storage_costs, verdict
from kvweave_lab.eval.outcomes import Outcome, Trace
from kvweave_lab.eval.report import matrix_json, matrix_table, storage_table, storages_json
from kvweave_lab.eval.rows import summary_rows
from kvweave_lab.statistics import interval_over_tasks
from lab_support.outcomes import OUTCOME
from lab_support.result_rows import outcome

RATIO = 0.15
SCORES = {
    ("full", 1.0): (1.0, 1.0, 1.0, 1.0),
    ("reuse", 0.0): (0.0, 0.5, 0.0, 0.5),
    ("similar+reuse", 0.0): (0.0, 0.5, 0.0, 0.5),
    ("prophetkv", RATIO): (0.25, 0.5, 0.25, 0.5),
    ("similar+prophetkv", RATIO): (0.5, 0.75, 0.5, 0.75),  # 0.25 more on every prompt
    ("isolated+fusionrag", RATIO): (1.0, 0.5, 1.0, 0.5),
    ("fusionrag", RATIO): (0.75, 0.25, 0.75, 0.25),  # 0.25 less; its own preparation is similar
    ("epic", RATIO): (0.5, 0.5, 0.5, 0.5),  # on bare chunks alone
}


@pytest.fixture
def outcomes():
    """Two prompts of each of two tasks."""
    return [
        outcome(("twohop", "coref")[number // 2], number, recipe, ratio, score, recomputed=round(100 * ratio))
        for (recipe, ratio), scores in SCORES.items()
        for number, score in enumerate(scores)
    ]


@pytest.fixture
def matrix(outcomes):
    (found,) = matrices(outcomes, summary_rows(outcomes))
    return found


def test_rows_are_selectors_that_ran_on_several_preparations(matrix):
    assert (matrix.context_tokens, matrix.ratio) == (512, RATIO)
    assert matrix.selectors == ("reuse", "prophetkv", "fusionrag")
    assert matrix.preparations == ("isolated", "similar")
    assert matrix.cell("fusionrag", "similar").recipe == "fusionrag"
    assert matrix.cell("prophetkv", "bare") is None


def test_a_cell_is_the_mean_over_tasks_with_its_share_of_the_gain(matrix):
    cell = matrix.cell("prophetkv", "similar")
    assert (cell.samples, cell.rows.value) == (4, 15)
    assert cell.score.value == 0.625
    assert cell.normalised.value == pytest.approx((0.625 - 0.25) / 0.75)


def test_a_gain_is_paired_prompt_by_prompt(matrix):
    """Every prompt differs by 0.25, however unlike the prompts are: no resample knows anything else."""
    for selector, gain in (("reuse", 0.0), ("prophetkv", 0.25), ("fusionrag", -0.25)):
        found = matrix.cell(selector, "similar").gain
        assert (found.value, found.low, found.high) == (gain, gain, gain)
        assert matrix.cell(selector, "isolated").gain is None


def test_the_verdict_counts_certain_differences(matrix):
    assert verdict(matrix, "similar") == (1, 1, 3)
    assert verdict(matrix, "isolated") is None


def test_every_length_and_ratio_has_its_own(outcomes):
    longer = [dataclasses.replace(each, context_tokens=2048) for each in outcomes]
    more = [dataclasses.replace(each, ratio=0.3) for each in outcomes if each.ratio == RATIO]
    everything = [*outcomes, *longer, *more]
    found = matrices(everything, summary_rows(everything))
    assert [(each.context_tokens, each.ratio) for each in found] == [(512, 0.15), (512, 0.3), (2048, 0.15)]
    assert all("reuse" in each.selectors for each in found)


def test_one_preparation_is_no_comparison(outcomes):
    alone = [each for each in outcomes if each.recipe in ("full", "reuse", "prophetkv", "fusionrag")]
    assert matrices(alone, summary_rows(alone)) == []


def test_a_ratio_at_which_no_selector_ran_on_two_preparations_has_no_matrix(outcomes):
    alone = [dataclasses.replace(one, ratio=0.3) for one in outcomes if one.recipe == "prophetkv"]
    assert [matrix.ratio for matrix in matrices([*outcomes, *alone], summary_rows([*outcomes, *alone]))] == [
        RATIO
    ]


def test_what_only_reuses_is_compared_where_nothing_else_ran(outcomes):
    plain = [each for each in outcomes if each.recipe in ("full", "reuse", "similar+reuse")]
    (found,) = matrices(plain, summary_rows(plain))
    assert (found.ratio, found.selectors) == (0.0, ("reuse",))


def test_the_table_fits_a_narrow_terminal_and_has_the_verdict(matrix):
    said = io.StringIO()
    Console(file=said, width=80).print(matrix_table(matrix))
    lines = [line.rstrip() for line in said.getvalue().splitlines()]
    assert "…" not in said.getvalue()
    assert lines[1].split() == ["isolated", "similar"]
    assert lines[3].split()[:2] == ["reuse", "0.250"]
    start = lines.index("gain over isolated") + 1
    assert [line.split() for line in lines[start : start + 3]] == [
        ["reuse", "–", "+0.000", "±.000"],
        ["prophetkv", "–", "+0.250", "±.000"],
        ["fusionrag", "–", "-0.250", "±.000"],
    ]
    assert "similar lifts 1 of 3 selectors and lowers 1" in " ".join(lines)


def test_json_has_every_cell(matrix):
    plain = matrix_json(matrix)
    assert json.loads(json.dumps(plain)) == plain
    assert len(plain["cells"]) == 6
    cell = plain["cells"][3]
    assert (cell["selector"], cell["preparation"], cell["recipe"]) == (
        "prophetkv",
        "similar",
        "similar+prophetkv",
    )
    assert (cell["gain"], cell["gain_interval"]) == (0.25, [0.25, 0.25])
    assert plain["cells"][2]["gain"] is plain["cells"][2]["gain_interval"] is None


MINE, THEIRS = ("mine", 0.1, None), ("theirs", 0.1, None)


def scored(label, task, sample, score):
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


def test_a_difference_is_the_mean_over_tasks_of_paired_differences():
    # one task of two prompts, one of one: a mean over prompts would give (0.5 + 0 + 0.2) / 3
    scores = {("a", 0): (1.0, 0.5), ("a", 1): (0.3, 0.3), ("b", 0): (0.4, 0.2)}
    outcomes = [
        scored(label, *place, score)
        for place, pair in scores.items()
        for label, score in zip((MINE, THEIRS), pair, strict=True)
    ]
    found = difference(outcomes, MINE, THEIRS)
    assert found.value == pytest.approx((0.25 + 0.2) / 2)
    assert found == interval_over_tasks([[0.5, 0.0], [0.4 - 0.2]])
    assert difference(outcomes, THEIRS, MINE).value == pytest.approx(-found.value)


def test_prompts_that_only_one_ran_on_do_not_count():
    outcomes = [scored(MINE, "a", 0, 1.0), scored(THEIRS, "a", 0, 0.5), scored(MINE, "a", 1, 0.0)]
    assert difference(outcomes, MINE, THEIRS).value == 0.5
    assert difference(outcomes[:1], MINE, THEIRS) is None


def test_another_budget_of_the_same_recipe_does_not_count():
    other = ("theirs", 0.2, None)
    outcomes = [scored(MINE, "a", 0, 1.0), scored(THEIRS, "a", 0, 0.5), scored(other, "a", 0, 0.9)]
    assert difference(outcomes, MINE, THEIRS).value == 0.5
    assert difference(outcomes, MINE, other).value == pytest.approx(0.1)


def test_several_pairs_are_averaged_prompt_by_prompt():
    other = ("mine", 0.5, None)
    scores = {0: (1.0, 0.25, 0.5), 1: (0.0, 0.5, 0.75), 2: (1.0, None, 0.0)}
    outcomes = [
        scored(label, "a", sample, score)
        for sample, given in scores.items()
        for label, score in zip((MINE, other, THEIRS), given, strict=True)
        if score is not None
    ]
    found = mean_difference(outcomes, [(MINE, THEIRS), (other, THEIRS)])
    assert found == interval_over_tasks([[(0.5 - 0.25) / 2, (-0.75 - 0.25) / 2]])  # the third lacks a run
    assert mean_difference(outcomes, [(MINE, ("none", 0.1, None))]) is None


def stored_outcomes(
    recipe: str, scores: dict[str, list[float]], ratio: float | None = 0.0
) -> Iterator[Outcome]:
    for task, values in scores.items():
        for number, score in enumerate(values):
            yield Outcome(
                task=task,
                context_tokens=512,
                seed=0,
                sample=f"{task}/{number}",
                recipe=recipe,
                ratio=ratio,
                answer=f"{score:g}",
                score=score,
                agreement=True,
                kl=0.0,
                faithfulness=1.0,
                rows=0,
                selection=None,
                trace=Trace(0, 0, 0, 0, 0),
                took_s=0.0,
                coverage=None if ratio is not None else 0.5,
            )


EXACT = {"single": [1.0, 1.0, 0.0, 1.0], "coref": [0.5, 0.5]}
INT8 = {"single": [1.0, 1.0, 0.0, 0.0], "coref": [0.5, 1.0]}


def test_each_prompt_is_compared_with_itself() -> None:
    ran = [
        *stored_outcomes("full", EXACT, 1.0),
        *stored_outcomes("reuse", EXACT),
        *stored_outcomes("isolated-int8+reuse", INT8),
        *stored_outcomes("isolated-int4+reuse", EXACT),
        *stored_outcomes("similar+prophetkv", INT8, None),
        *stored_outcomes("similar-int8+prophetkv", INT8, None),
        *stored_outcomes("isolated-int8+prophetkv", INT8, 0.2),  # whose exact twin did not run
    ]
    costs = storage_costs(ran)
    assert [(cost.recipe, cost.storage, cost.ratio, cost.coverage) for cost in costs] == [
        ("reuse", "int8", 0.0, None),
        ("reuse", "int4", 0.0, None),
        ("similar+prophetkv", "int8", None, 0.5),
    ]
    first, second, third = costs
    assert (first.samples, first.exact_score.value, first.score.value) == (6, 0.625, 0.625)
    assert first.lost.value == (1 / 4 - 1 / 4) / 2  # a quarter lost on one task, won on the other
    assert first.lost.low < 0 < first.lost.high
    assert first.same.value == (3 / 4 + 1 / 2) / 2
    for equal in (second, third):
        assert (equal.lost.value, equal.lost.low, equal.lost.high, equal.same.value) == (0, 0, 0, 1)


def test_the_table_and_its_plain_values() -> None:
    costs = storage_costs([*stored_outcomes("reuse", EXACT), *stored_outcomes("isolated-int8+reuse", INT8)])
    console = Console(width=120, record=True, file=StringIO())
    console.print(storage_table(costs))
    (line,) = [line.split() for line in console.export_text().splitlines() if line.startswith("reuse")]
    assert line[:6] == ["reuse", "512", "0", "int8", "6", "0.625"]
    (plain,) = storages_json(costs)
    assert plain["lost_interval"] == [costs[0].lost.low, costs[0].lost.high]
    assert plain["storage"] == "int8"
    assert storages_json([]) == []
