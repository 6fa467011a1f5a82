"""Where the recipe `naive` leaves stored keys."""

import pytest

import kvweave
from kvweave.recipes.methods import PREPARATIONS
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave_lab.recipes.baselines import StoredPositions


@pytest.mark.parametrize(("prepare", "alone"), [("bare", True), ("isolated", False), ("observed", False)])
def test_stored_positions_are_those_of_the_preparation(adapter, store, prompt, prepare, alone):
    recipe = Recipe("placed", prepare=PREPARATIONS[prepare]())
    kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget())
    placed = StoredPositions().place(request, recipe.match.find(request, recipe.prepare)).spans
    after_prefix = len(adapter.template.prefix_ids(prompt.system))
    chunks = {span.start for span in request.prompt.spans[1:-1]}
    found = [span.rope_start for span in placed if span.start in chunks]
    assert found == [0 if alone else after_prefix] * 4
