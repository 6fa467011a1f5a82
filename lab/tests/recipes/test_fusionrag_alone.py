"""FusionRAG as its text reads literally, against its definition: products of a question that saw no chunk."""

from dataclasses import replace

import pytest
import torch

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkKV, Prompt
from kvweave_lab.recipes.fusionrag import IsolatedQuestionProducts
from support.contract import eager_model, prepare, state_of

CHUNKS = tuple(f"{number} the river in the north and the inn on the road" for number in range(8))


def test_it_multiplies_unrotated_queries_and_keys(adapter, store, prompt):
    plain = eager_model()
    prepare(adapter, store, prompt, "fusionrag-alone")
    state = state_of(adapter, store, prompt, "fusionrag-alone")
    tokens, last = state.request.prompt, plain.model.layers[-1].self_attn.q_proj
    question, seen = tokens.spans[-1], []
    hook = last.register_forward_hook(lambda module, given, out: seen.append(out[0]))
    with torch.no_grad():
        plain(torch.tensor([[*tokens.ids(tokens.spans[0]), *tokens.ids(question)]]))
    hook.remove()
    first, end = (tokens.spans[0].tokens + row - question.start for row in tokens.user_rows)
    queries = seen[0].unflatten(-1, (-1, plain.config.hidden_size // plain.config.num_attention_heads))
    expected = []
    for found in state.matched:
        if found.origin != "reused":
            continue
        assert found.provenance.kind == "similar-10"
        keys = found.kv.kv[-1, 0]  # (G, n, D)
        shared = queries.shape[1] // keys.shape[0]
        products = [queries[first:end, head] @ keys[head // shared].T for head in range(queries.shape[1])]
        expected.append(torch.stack(products).sum(dim=(0, 1)))
    found = recipe_named("fusionrag-alone").select.score.scores(state)
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)
    assert found.unique().numel() > 1


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_it_reads_the_last_layer_that_sees_the_whole_context(family):
    adapter, store = tiny_adapter(family), MemoryStore()
    prompt = Prompt("Inn?", CHUNKS)
    prepare(adapter, store, prompt, "fusionrag-alone")
    state = state_of(adapter, store, prompt, "fusionrag-alone")
    read: set[int] = set()
    watched = [
        replace(m, kv=ChunkKV(m.kv.token_ids, Watched(m.kv.kv, read)))
        for m in state.matched
        if m.origin == "reused"
    ]
    IsolatedQuestionProducts().scores(replace(state, matched=(state.matched[0], *watched)))
    assert read == {max(layer for layer, window in enumerate(adapter.geometry.windows) if window is None)}


class Watched:
    """KV of a chunk that records which of its layers are read."""

    def __init__(self, kv, read):
        self.kv, self.read, self.shape, self.dtype, self.nbytes = kv, read, kv.shape, kv.dtype, kv.nbytes

    def layer(self, index):
        self.read.add(index)
        return self.kv[index]
