"""Which samples go through which candidates."""

from dataclasses import replace

import pytest
import torch

from kvweave.errors import InvalidRequest, PromptTooLong, UnknownRecipe
from kvweave.recipes.methods import METHODS, PREPARATIONS
from kvweave.recipes.recipe import Recipe
from kvweave.testing import tiny_adapter
from kvweave_lab.eval import grid
from kvweave_lab.eval.grid import (
    SUITES,
    Case,
    Suite,
    candidates_of,
    evaluate,
    generated_cases,
    matrix_of,
    selectors,
    suite_named,
)
from kvweave_lab.eval.outcomes import OutcomeLog
from kvweave_lab.eval.runner import Runner
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.tasks import TASKS
from kvweave_lab.eval.world import Haystack

SUITE = Suite(
    tasks=("single", "order"),
    context_tokens=(300, 200),
    chunk_tokens=60,
    recipes=("reuse",),
    ratios=(0.0,),
    seeds=(3, 4),
    samples=2,
)
HAY = Haystack(["It rains. The old trees stand still in the wind, and nobody walks by. Then it is night."])


def words(text: str) -> int:
    return len(text.split())


def cases(suite=SUITE, split="dev"):
    return list(generated_cases(suite, split, HAY, words))


def among(recipes, ratios, **more):
    return candidates_of(replace(SUITE, recipes=tuple(recipes), ratios=tuple(ratios), **more))


def labels(recipes, ratios, **more):
    """Recipe and ratio of each candidate."""
    found = [candidate.label for candidate in among(recipes, ratios, **more)]
    assert all(coverage is None for _, _, coverage in found)
    return [(recipe, ratio) for recipe, ratio, _ in found]


class SelectsSomething:
    """Represents the select slot of any selective recipe."""

    selective = supports_coverage = True
    extractors = ()

    def choose(self, state):
        return state.stale[: state.request.budget.max_rows(state.stale.numel())].to(torch.long)


@pytest.fixture
def selective(monkeypatch):
    """A recipe of this name that spends any ratio."""
    known = grid.recipe_named
    made = Recipe("selective", select=SelectsSomething())
    monkeypatch.setattr(
        grid, "recipe_named", lambda name, *how: made if name == "selective" else known(name, *how)
    )
    return "selective"


class TestCandidates:
    def test_reuse_at_zero_is_always_there_and_first(self):
        assert labels([], []) == labels([], [0.2, 0.5]) == [("reuse", 0.0)]
        assert labels(["naive", "reuse"], [1.0])[0] == ("reuse", 0.0)

    def test_what_recomputes_nothing_runs_at_zero_and_at_one_only_if_asked(self):
        assert labels(["naive"], [0.0, 0.2, 0.5]) == [("reuse", 0.0), ("naive", 0.0)]
        assert labels(["naive"], [0.2, 1.0]) == [
            ("reuse", 0.0),
            ("reuse", 1.0),
            ("naive", 0.0),
            ("naive", 1.0),
        ]

    def test_what_selects_runs_at_every_ratio_asked_for(self, selective):
        assert labels([selective], [0.2, 0.5]) == [("reuse", 0.0), ("selective", 0.2), ("selective", 0.5)]

    def test_full_attention_is_no_candidate(self):
        assert labels(["full", "naive"], [0.0]) == [("reuse", 0.0), ("naive", 0.0)]

    def test_nothing_is_there_twice(self, selective):
        assert labels([selective, "reuse", selective], [0.2, 0.2, 0]) == [
            ("reuse", 0.0),
            ("selective", 0.2),
            ("selective", 0.0),
        ]

    def test_an_unknown_recipe_is_refused(self):
        with pytest.raises(UnknownRecipe, match="'magic'"):
            among(["magic"], [0.0])

    def test_a_coverage_is_for_recipes_whose_scores_add_up_and_no_ratio(self, selective):
        found = [
            candidate.label for candidate in among([selective, "epic", "naive"], [0.2], coverages=(0.5,))
        ]
        assert found == [
            ("reuse", 0.0, None),
            (selective, 0.2, None),
            (selective, None, 0.5),
            ("epic", 0.2, None),
            ("naive", 0.0, None),
        ]

    def test_named_preparations_replace_the_recipes_own(self):
        found = labels(["reuse", "prophetkv"], [0.2], preparations=("bare", "isolated"))
        assert found == [
            ("reuse", 0.0),
            ("bare+reuse", 0.0),
            ("bare+prophetkv", 0.2),
            ("prophetkv", 0.2),  # isolated is what it prepares anyway
        ]

    def test_what_prepares_nothing_cannot_be_prepared_otherwise(self):
        with pytest.raises(
            InvalidRequest, match="'prefix' prepares nothing, also not as 'bare'; leave it or"
        ):
            among(["prefix"], [0.0], preparations=("bare",))


class TestGeneratedCases:
    def test_lengths_are_outermost_then_tasks_then_seeds(self):
        order = [(case.context_tokens, case.sample.task, case.seed) for case in cases()]
        assert order == [
            (tokens, task, seed)
            for tokens in (300, 200)
            for task in ("single", "order")
            for seed in (3, 4)
            for _ in "ab"
        ]

    def test_duplicates_count_once(self):
        twice = {name: getattr(SUITE, name) * 2 for name in ("tasks", "context_tokens", "seeds")}
        assert cases(replace(SUITE, **twice)) == cases()

    def test_names_are_unique(self):
        assert len({case.sample.name for case in cases()}) == 16

    def test_splits_share_no_question(self):
        assert not {c.sample.question for c in cases()} & {c.sample.question for c in cases(split="test")}

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [
            ({"tasks": ("single", "juggling")}, "no task 'juggling'; choose from single, multikey"),
            ({"context_tokens": (4,), "chunk_tokens": 4}, "take a longer context"),
        ],
    )
    def test_impossible_suites_are_refused(self, wrong, said):
        with pytest.raises(InvalidRequest, match=said):
            cases(replace(SUITE, **wrong))


class TestEvaluate:
    @pytest.fixture
    def runner(self):
        return Runner(tiny_adapter(), OutcomeLog(None, {}))

    @staticmethod
    def case(number: int, question: str = "Where?") -> Case:
        return Case(
            Sample(f"file/{number}", "file", ("Here.", "Or there."), question, ("x",), "f1", 2), 0, number
        )

    def test_every_case_goes_through_every_candidate_in_order(self, runner):
        heard = []
        asked = among(["naive"], [1.0])
        outcomes = evaluate(
            [self.case(0), self.case(1)], 2, asked, runner, lambda *progress: heard.append(progress)
        )
        labels = [("full", 1.0, None), *(candidate.label for candidate in asked)]
        assert [(outcome.sample, outcome.label) for outcome in outcomes] == [
            (f"file/{number}", label) for number in (0, 1) for label in labels
        ]
        assert heard == [("prompts", 1, 2), ("prompts", 2, 2)]

    def test_a_selective_recipe_recomputes_its_share(self, runner, selective):
        outcomes = evaluate([self.case(0)], 1, among([selective], [0.25]), runner)
        (trace,) = (outcome.trace for outcome in outcomes if outcome.recipe == selective)
        assert trace.recomputed == -(-trace.stale // 4) > 0

    def test_a_prompt_that_does_not_fit_is_named(self, runner):
        with pytest.raises(PromptTooLong, match=r"file/1: the prompt has \d+ tokens"):
            evaluate([self.case(0), self.case(1, "Where? " * 200)], 2, [], runner)


class TestSuites:
    @pytest.mark.parametrize("name", SUITES)
    def test_a_suite_names_what_there_is(self, name):
        suite = suite_named(name)
        assert set(suite.tasks) <= set(TASKS)
        assert set(suite.recipes) <= set(METHODS)
        assert candidates_of(suite)
        assert suite.samples * len(suite.seeds) >= 200  # for every figure that is quoted

    def test_an_unknown_suite_is_refused(self):
        with pytest.raises(InvalidRequest, match="no suite 'slow'; choose one of quick, full"):
            suite_named("slow")

    def test_a_matrix_is_every_selector_on_every_preparation_at_one_ratio(self):
        suite = matrix_of(SUITE)
        assert (suite.tasks, suite.samples) == (SUITE.tasks, SUITE.samples)
        found = {candidate.label for candidate in candidates_of(suite)}
        pairs = {
            (selector, preparation, 0.0 if selector == "reuse" else 0.15)
            for selector in selectors()
            for preparation in PREPARATIONS
        }
        assert len(found) == len(pairs)
        assert {("reuse", 0.0, None), ("similar+prophetkv", 0.15, None), ("fusionrag", 0.15, None)} <= found
