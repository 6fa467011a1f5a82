"""Where stored keys are rotated to."""

import pytest

import kvweave
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.place import AsStored, TruePositions
from kvweave.recipes.request import Budget, PrefillRequest


def starts(adapter, store, prompt, place, prepare):
    """The first position of every stored chunk."""
    recipe = recipe_named("naive", prepare)
    kvweave.prepare(adapter, store, prompt.chunks, recipe=recipe, system=prompt.system)
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget())
    placed = place.place(request, recipe.match.find(request, recipe.prepare)).spans
    stored = {span.start: span.rope_start for span in placed}
    chunks = [span.start for span in request.prompt.spans[1:-1]]
    assert stored.pop(0, 0) == 0  # the system prefix, where a preparation stores one
    assert list(stored) == chunks
    return list(stored.values()), chunks


@pytest.mark.parametrize(("prepare", "alone"), [("bare", True), ("isolated", False), ("observed", False)])
def test_as_stored_is_where_a_chunk_stood_when_it_was_prepared(adapter, store, prompt, prepare, alone):
    behind = len(adapter.template.prefix_ids(prompt.system))
    found, _ = starts(adapter, store, prompt, AsStored(), prepare)
    assert found == [0 if alone else behind] * 4


def test_true_positions_are_those_in_the_prompt(adapter, store, prompt):
    found, true = starts(adapter, store, prompt, TruePositions(), "isolated")
    assert found == true
