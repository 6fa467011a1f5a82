"""Preparations beside selectors, worked out by hand from a handful of outcomes."""

import dataclasses
import io
import json

import pytest
from rich.console import Console
from test_summary import outcome

from kvweave_lab.eval.matrix import matrices, verdict
from kvweave_lab.eval.report import matrix_json, matrix_table
from kvweave_lab.eval.summary import rows

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
    (found,) = matrices(outcomes, rows(outcomes))
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


def test_the_verdict_counts_what_is_certain(matrix):
    assert verdict(matrix, "similar") == (1, 1, 3)
    assert verdict(matrix, "isolated") is None


def test_every_length_and_ratio_has_its_own(outcomes):
    longer = [dataclasses.replace(each, context_tokens=2048) for each in outcomes]
    more = [dataclasses.replace(each, ratio=0.3) for each in outcomes if each.ratio == RATIO]
    everything = [*outcomes, *longer, *more]
    found = matrices(everything, rows(everything))
    assert [(each.context_tokens, each.ratio) for each in found] == [(512, 0.15), (512, 0.3), (2048, 0.15)]
    assert all("reuse" in each.selectors for each in found)


def test_one_preparation_is_no_comparison(outcomes):
    alone = [each for each in outcomes if each.recipe in ("full", "reuse", "prophetkv", "fusionrag")]
    assert matrices(alone, rows(alone)) == []


def test_a_ratio_at_which_no_selector_ran_on_two_preparations_has_no_matrix(outcomes):
    alone = [dataclasses.replace(one, ratio=0.3) for one in outcomes if one.recipe == "prophetkv"]
    assert [matrix.ratio for matrix in matrices([*outcomes, *alone], rows([*outcomes, *alone]))] == [RATIO]


def test_what_only_reuses_is_compared_where_nothing_else_ran(outcomes):
    plain = [each for each in outcomes if each.recipe in ("full", "reuse", "similar+reuse")]
    (found,) = matrices(plain, rows(plain))
    assert (found.ratio, found.selectors) == (0.0, ("reuse",))


def test_the_table_fits_a_narrow_terminal_and_says_the_verdict(matrix):
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
