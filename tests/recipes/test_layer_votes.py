"""Which layers count in a score: the rule, and where selected rows are on every family with sliding windows."""

import math
from dataclasses import replace

import pytest
import torch
from contract import prepare, state_of

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.hooks import AttentionProbe
from kvweave.models.pass_cost import PassCost
from kvweave.ops.scores import top_tokens
from kvweave.recipes.layer_votes import LayerVotes, last_layer, layer_vote, voting_layers
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.select import QuestionAttention
from kvweave.testing import FAMILIES, tiny_adapter, tiny_model, tiny_tokenizer
from kvweave.types import Prompt

WINDOW = 16
SLIDING = [
    name for name in FAMILIES if WINDOW in PassCost.of(tiny_model(name)).windows
]
HYBRID = [name for name in SLIDING if None in PassCost.of(tiny_model(name)).windows]
ASKING = ("prophetkv", "weave", "qcfuse", "kvshare", "fusionrag", "fusionrag-over-stale")
RATIO = 0.1
CHUNKS = 10
WORDS = "the river in the north and the inn on the road were there when the rain began again".split()



GEOMETRY = tiny_adapter().geometry


def with_windows(*windows):
    return replace(GEOMETRY, layers=len(windows), windows=windows)


@pytest.mark.parametrize(
    ("windows", "distance", "chosen", "layers", "lifted"),
    [
        ((None, None, None), 100, None, (0, 1, 2), None),
        ((16, 16, None), 15, None, (0, 1, 2), None),  # a window of 16 tokens reaches 15 tokens back
        ((16, 16, None), 16, None, (2,), None),
        ((16, 64, None), 40, None, (1, 2), None),
        ((16, 16, 16), 16, None, (0, 1, 2), 16),
        ((16, 64, 16, 64), 99, None, (1, 3), 64),  # those that see furthest
        ((16, None, 16, 16, None), 99, (1, 2, 3), (1,), None),  # chosen layers that do not see it all are left out
        ((16, None, 16, 16, None), 99, (0, 3), (1, 4), None),  # or replaced, if none of the chosen sees it all
        ((16, None, 16, None, 16), 99, (2,), (1,), None),  # by the nearest; the earlier of two
        ((16, None, 16, None, 16), 99, (-1,), (3,), None),
        ((16, 64, 16), 99, (0,), (1,), 64),
        ((16, 64, 16), 15, (0, -1), (0, 2), None),
    ],
)
def test_layers_count_that_see_everything_else_those_that_see_furthest(
    windows, distance, chosen, layers, lifted
):
    assert voting_layers(with_windows(*windows), 7, 7 + distance, chosen) == LayerVotes(layers, lifted)


def test_a_layer_that_cannot_be_replaced_is_lifted():
    geometry = with_windows(16, None)
    assert [layer_vote(geometry, 0, last, 0) for last in (15, 16)] == [
        LayerVotes((0,)),
        LayerVotes((0,), lifted_window=16),
    ]
    assert layer_vote(geometry, 0, 99, 1) == LayerVotes((1,))
    assert [last_layer(with_windows(None, 16), tokens).layers for tokens in (0, 16, 17)] == [(1,), (1,), (0,)]


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_are_those_that_the_configuration_names(family):
    adapter = tiny_adapter(family)
    windows = PassCost.of(adapter.model).windows
    assert (adapter.geometry.windows or (None,) * adapter.geometry.layers) == windows
    assert len(adapter.geometry.windows) in (0, adapter.geometry.layers)
