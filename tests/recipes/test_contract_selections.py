"""Every selective recipe: what it selects with every kind of budget and on every preparation."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvweave.errors import InvalidRequest
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import METHODS, PREPARATIONS, recipe_named
from kvweave.recipes.prepare import NotPrepared
from kvweave.recipes.recipe import run
from kvweave.recipes.request import CEILING, FLOOR
from kvweave.recipes.select import TopScores
from support.contract import SELECTING, Counted, prepare, stale_rows

OF_SHARES = [name for name in METHODS if recipe_named(name).select.supports_coverage]
RANKED = [name for name in OF_SHARES if isinstance(recipe_named(name).select, TopScores)]


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture(scope="module")
def prepared():
    """One store per preparation, to which each selector adds its features."""
    return {name: MemoryStore() for name in PREPARATIONS}


def checked(adapter, store, prompt, recipe, **budget):
    """Return a result after checking that its selection is sorted, stale, and computed once per layer on average."""
    counted = Counted(recipe.recompute)
    tokens = adapter.template.render(prompt)
    result = run(replace(recipe, recompute=counted), adapter, store, tokens, **budget)
    stale, selected = stale_rows(result), result.selected.tolist()
    assert stale
    assert selected == sorted(set(selected))
    assert set(selected) <= set(stale)
    assert len(counted.rows) == adapter.geometry.layers
    computed = [set(rows) & set(stale) for rows in counted.rows]
    assert sum(map(len, computed)) == len(selected) * len(computed)
    return result


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("ratio", [0.05, 0.5, 0.99])
def test_a_selection_is_sorted_stale_and_within_budget(name, ratio, adapter, store, prompt):
    recipe = recipe_named(name)
    prepare(adapter, store, prompt, name)
    result = checked(adapter, store, prompt, recipe, ratio=ratio)
    assert len(result.selected) <= math.ceil(ratio * len(stale_rows(result)))
    assert (
        len(result.selected) or name == "cacheclip-windows"
    )  # its windows may drop everything that a small budget selects
    again = run(recipe, adapter, store, adapter.template.render(prompt), ratio=ratio)
    assert again.selected.equal(result.selected)
    assert again.logits.equal(result.logits)


@pytest.mark.parametrize("name", SELECTING)
@pytest.mark.parametrize("preparation", PREPARATIONS)
def test_every_selector_runs_on_every_preparation(name, preparation, adapter, prepared, prompt):
    recipe, store = recipe_named(name, preparation), prepared[preparation]
    prepare(adapter, store, prompt, recipe)
    result = checked(adapter, store, prompt, recipe, ratio=0.2)
    assert len(result.selected) <= math.ceil(0.2 * len(stale_rows(result)))
    assert len(result.selected) or name == "cacheclip-windows"
    assert result.logits.isfinite().all()


@pytest.mark.parametrize("name", OF_SHARES)
def test_a_coverage_stays_between_its_bounds_and_grows(name, adapter, store, prompt):
    recipe = recipe_named(name)
    prepare(adapter, store, prompt, name)
    results = [checked(adapter, store, prompt, recipe, coverage=share) for share in (0.0, 0.2, 0.5, 1.0)]
    stale, counts = len(stale_rows(results[0])), [len(result.selected) for result in results]
    assert counts == sorted(counts)
    assert counts[-1] <= math.ceil(CEILING * stale)
    assert counts[0] >= math.ceil(FLOOR * stale) or name == "cacheclip-windows"


@dataclass(frozen=True)
class RecordedScore:
    """Keeps the scores of another score."""

    score: Any
    seen: list = field(default_factory=list)
    supports_coverage = True

    @property
    def extractors(self):
        return self.score.extractors

    def scores(self, state):
        self.seen.append(self.score.scores(state))
        return self.seen[-1]


@pytest.mark.parametrize("name", RANKED)
def test_a_coverage_is_reached_with_the_fewest_rows(name, adapter, store, prompt):
    """Unless the floor or the ceiling applies; scores that are shares are never negative."""
    recipe, share = recipe_named(name), 0.3
    prepare(adapter, store, prompt, name)
    recorded = RecordedScore(recipe.select.score)
    assert isinstance(recipe.select, TopScores)
    select = replace(recipe.select, score=recorded)
    result = checked(adapter, store, prompt, replace(recipe, select=select), coverage=share)
    scores, stale = recorded.seen[0], stale_rows(result)
    assert (scores >= 0).all()
    assert scores.sum() > 0
    chosen = sorted((float(scores[stale.index(row)]) for row in result.selected.tolist()), reverse=True)
    if not select.sampled:
        assert chosen == sorted(scores.tolist(), reverse=True)[: len(chosen)]
    wanted = share * float(scores.double().sum())
    if len(chosen) < math.ceil(CEILING * len(stale)):
        assert sum(chosen) >= wanted * (1 - 1e-5)
    if not select.sampled and len(chosen) > math.ceil(FLOOR * len(stale)):
        assert sum(chosen[:-1]) <= wanted * (1 + 1e-5)


EVER_STALE = [name for name in METHODS if recipe_named(name).prepare != NotPrepared()]


@pytest.mark.parametrize("name", [name for name in EVER_STALE if name not in OF_SHARES])
def test_a_coverage_of_other_scores_is_refused(name, adapter, store, prompt):
    prepare(adapter, store, prompt, name)
    said = "no shares of a whole" if name in SELECTING else "recomputes nothing"
    with pytest.raises(InvalidRequest, match=said):
        run(recipe_named(name), adapter, store, adapter.template.render(prompt), coverage=0.3)
