"""Where stored keys are rotated to."""

import kvweave
from kvweave.recipes.methods import PREPARATIONS
from kvweave.recipes.place import TruePositions
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Budget, PrefillRequest


def starts(adapter, store, prompt, place, prepare):
    """The first position of every stored chunk."""
    recipe = Recipe("placed", prepare=PREPARATIONS[prepare]())
    kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget())
    placed = place.place(request, recipe.match.find(request, recipe.prepare)).spans
    stored = {span.start: span.rope_start for span in placed}
    chunks = [span.start for span in request.prompt.spans[1:-1]]
    assert stored.pop(0, 0) == 0  # the system prefix, where a preparation stores one
    assert list(stored) == chunks
    return list(stored.values()), chunks


def test_true_positions_are_those_in_the_prompt(adapter, store, prompt):
    found, true = starts(adapter, store, prompt, TruePositions(), "isolated")
    assert found == true
