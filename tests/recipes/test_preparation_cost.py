"""What preparing some of a prompt's chunks costs, in tokens that passes run over."""

import pytest

from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.context import ChunkList, PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import preparation_cost, prepare_chunks
from support.tiny_kb import Letters

CHUNKS = [tuple(range(10 * number + 1, 10 * number + 9)) for number in range(4)]
"""Four chunks of eight tokens."""
NAMED = [(digest_tokens(ids), len(ids)) for ids in CHUNKS]


@pytest.fixture
def ctx(adapter):
    texts = [" ".join(map(str, ids)) for ids in CHUNKS]
    corpus = ChunkList([texts], lambda text: tuple(map(int, text.split())), Letters().encode)
    return PrepareContext(adapter, MemoryStore(), (1, 2, 3), corpus)


def test_a_chunk_alone_costs_its_own_tokens_until_it_is_stored(ctx):
    recipe = recipe_named("reuse")
    assert preparation_cost(ctx, NAMED, recipe).of([0, 2]) == 16
    prepare_chunks(ctx, CHUNKS[:1], recipe)
    assert preparation_cost(ctx, NAMED, recipe).of([0, 2]) == 8


def test_after_others_a_chunk_also_costs_the_plain_kv_of_all(ctx):
    recipe = recipe_named("weave")
    assert preparation_cost(ctx, NAMED, recipe).of([1]) == 4 * 8 + 8
    prepare_chunks(ctx, CHUNKS, recipe_named("reuse"))
    assert preparation_cost(ctx, NAMED, recipe).of([1]) == 8
    prepare_chunks(ctx, CHUNKS, recipe)
    assert preparation_cost(ctx, NAMED, recipe).of([1]) == 0
