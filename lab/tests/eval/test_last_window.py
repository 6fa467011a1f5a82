"""The experiment that measures rows in the last window, and layers with windows in the lab's own measures."""

import pytest
import torch

from kvweave.errors import InvalidRequest
from kvweave.models.hooks import AttentionProbe
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave.types import Prompt
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.layer_attention import profile_layers
from kvweave_lab.tuning.distillation import observe_teacher

CHUNKS = tuple(f"{number} the inn on the road was there when Mira came" for number in range(8))
SAMPLE = Sample("A", "single", CHUNKS, "Mira?", ("road",), "string_match_all", 2)


@pytest.fixture
def adapter():
    return tiny_adapter("gemma3")


@pytest.fixture
def last_window(script):
    return script("last_window")


def test_shares_before_and_after_layers_are_left_out(last_window, adapter):
    window = last_window.narrowest_window(adapter)
    prompt = last_window.placed_prompt(adapter, SAMPLE, window)
    assert int(prompt.last.sum()) == window == 16
    recipes = [recipe_named("prophetkv"), last_window.full_alone(adapter)]
    question, alone = last_window.measure(adapter, [prompt], recipes, 0.1)
    assert adapter.geometry.windows == (16, None, 16)
    assert question["before"]["last_window"]["value"] > question["after"]["last_window"]["value"]
    assert question["after"] == alone["before"] == alone["after"]
    assert 0 <= question["after"]["evidence"]["value"] <= 1


def test_a_model_without_windows_is_refused(last_window):
    with pytest.raises(InvalidRequest, match="no sliding windows"):
        last_window.narrowest_window(tiny_adapter())


def test_only_layers_that_see_the_whole_context_become_critical(adapter):
    found = profile_layers(adapter, [SAMPLE], ratio=0.3, count=2)
    assert found.critical_layers == (1,)
    assert len(found.found) == 3


def test_a_teacher_shows_its_last_layer_that_sees_the_whole_context(adapter):
    prompt = Prompt(SAMPLE.question, CHUNKS)
    tokens = adapter.template.render(prompt)
    first, end = tokens.spans[1].start, tokens.spans[-2].end
    probe = AttentionProbe(torch.arange(*tokens.user_rows), columns=(first, end), layers={1})
    plan = adapter.rows(torch.arange(tokens.tokens))
    plan.hooks.append(probe)
    adapter.compute(adapter.new_cache(tokens.tokens), tokens.token_ids, plan)
    example = observe_teacher(adapter, prompt)
    assert example is not None
    torch.testing.assert_close(torch.cat(example.attended), probe.weights[0])
