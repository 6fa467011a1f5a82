"""Shared by the contract tests: fixtures, preparation without an embedding model, and the results of plain full attention."""

import hashlib

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvweave
from kvweave.recipes.context import ChunkList, PrepareContext
from kvweave.recipes.features import attention_key
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recompute, run
from kvweave.recipes.request import Budget, PrefillRequest
from kvweave.testing import tiny_adapter, tiny_model
from kvweave.types import ChunkFeature

TOLERANCE = 1e-4
SELECTING = [name for name in METHODS if recipe_named(name).select.selective]
WORDS = "the river in the north and the inn on the road were there when the rain began again".split()


def text(number: int, words: int = 12) -> str:
    picks = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(number)).tolist()
    return f"{number} " + " ".join(WORDS[i] for i in picks)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture
def store(tmp_path):
    with kvweave.ChunkStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def prompt():
    return kvweave.Prompt("Where is the inn?", tuple(text(i) for i in range(4)), system="Answer.")


def plain_logits(adapter, prompt):
    """Return (1, vocab) from an ordinary call of the model."""
    tokens = adapter.template.render(prompt)
    adapter.rotation.reset_lengths()
    with torch.no_grad():
        return adapter.model(torch.tensor([tokens.token_ids]), use_cache=False, logits_to_keep=1).logits[
            :, -1
        ]


def close(a, b):
    torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def corpus_of(adapter, prompt):
    """A corpus in which similar texts have similar lengths, so that no embedding model is needed."""
    return ChunkList(
        [prompt.chunks],
        adapter.template.chunk_ids,
        lambda texts: np.array([[len(t), 1.0] for t in texts], dtype=np.float32),
    )


def ctx_of(adapter, store, prompt):
    return PrepareContext(
        adapter, store, adapter.template.prefix_ids(prompt.system), corpus_of(adapter, prompt)
    )


def prepare(adapter, store, prompt, recipe, chunks=slice(None)):
    """Prepare some of a prompt's chunks for a recipe or a name."""
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    ids = [adapter.template.chunk_ids(text) for text in prompt.chunks[chunks]]
    return prepare_chunks(ctx_of(adapter, store, prompt), ids, recipe)


def prefilled(adapter, store, prompt, name, **budget):
    """Prefill a prompt without storing new entries."""
    return run(recipe_named(name), adapter, store, adapter.template.render(prompt), **budget)


def state_of(adapter, store, prompt, recipe):
    """Return the placed prompt of a recipe or a name, with nothing computed yet."""
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    request = PrefillRequest(adapter, store, adapter.template.render(prompt), Budget(0.2))
    matched = recipe.match.find(request, recipe.prepare)
    placed = recipe.place.place(request, matched)
    kv_cache = adapter.new_cache(request.prompt.tokens, placed.spans, placed.positions)
    return PrefillState(request, kv_cache, matched, recipe.attend)


def second_layer_distances(adapter, state):
    """Return full attention's keys and values in the second layer minus the stored ones, of stale rows."""
    ids = state.request.prompt.token_ids
    whole, stored = adapter.new_cache(len(ids)), adapter.new_cache(len(ids), state.kv_cache.spans)
    adapter.compute(whole, ids, adapter.rows(torch.arange(len(ids))))
    adapter.compute(stored, ids, adapter.rows(state.fresh))
    pairs = zip(_second_layer(whole, len(ids)), _second_layer(stored, len(ids)), strict=True)
    return [(new - stale)[:, state.stale] for new, stale in pairs]


def _second_layer(kv_cache, tokens):
    """Return keys and values, each (G, N, D)."""
    layer = kv_cache.layers[1]
    return layer.keys[0, :, :tokens], layer.values[0, :, :tokens]


def eager_model():
    """Return a tiny model that returns its attention weights."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    return model


def question_attention(plain, adapter, store, prompt, name):
    """The question's attention when an ordinary call continues from the stale KV, (L, H, question rows, N)."""
    tokens = adapter.template.render(prompt)
    kv_cache = prefilled(adapter, store, prompt, name, ratio=0.0).kv_cache
    start, (first, end) = tokens.spans[-1].start, tokens.user_rows
    held = DynamicCache()
    for number, layer in enumerate(kv_cache.layers):
        held.update(layer.keys[:, :, :start].clone(), layer.values[:, :, :start].clone(), number)
    with torch.no_grad():
        out = plain(torch.tensor([tokens.token_ids[start:]]), past_key_values=held, output_attentions=True)
    return torch.stack([layer[0, :, first - start : end - start] for layer in out.attentions])


def context_shares(weights, state):
    """Attention to the chunks as shares of their sum, averaged over heads and rows, (L, context)."""
    first, end = state.context
    inside = weights[..., first:end]
    return (inside / inside.sum(dim=-1, keepdim=True)).mean(dim=(1, 2))


def entries(adapter, store, prompt):
    """Return all KV of the system prefix and the chunks as the store returns it, by tokens and provenance."""
    ids = [tuple(adapter.template.chunk_ids(text)) for text in prompt.chunks]
    ids.append(tuple(adapter.template.prefix_ids(prompt.system)))
    made = store.versions(adapter.fingerprint, ids)
    found = {}
    for chunk, provenances in zip(ids, made, strict=True):
        for provenance in provenances:
            found[chunk, provenance] = store.get(adapter.fingerprint, chunk, provenance).kv
    return found


def features(adapter, store, prompt, recipe):
    """Return all features of the chunks that a recipe uses, by tokens, provenance and tensor name."""
    prefix, found = adapter.template.prefix_ids(prompt.system), {}
    wanted = []
    for text in prompt.chunks:
        ids = tuple(adapter.template.chunk_ids(text))
        extractors = (*recipe.prepare.extractors, *recipe.select.extractors)
        wanted += [(ids, extractor.provenance(adapter, prefix, len(ids))) for extractor in extractors]
        (versions,) = store.versions(adapter.fingerprint, [ids])
        wanted += [(ids, attention_key(provenance)) for provenance in versions]
    for (ids, provenance), feature in zip(
        wanted, store.find_features(adapter.fingerprint, wanted), strict=True
    ):
        if feature is not None:
            assert isinstance(feature, ChunkFeature)
            found |= {(ids, provenance, name): tensor for name, tensor in feature.tensors.items()}
    return found


def stale_rows(result):
    return [i for span in result.plan.spans if span.origin == "reused" for i in range(span.start, span.end)]


class Counted(Recompute):
    """A recompute slot that records which rows each layer computes."""

    def __init__(self, inner):
        self.inner, self.rows = inner, []

    @property
    def writes_reused(self):
        return self.inner.writes_reused

    def run(self, state, rows, hooks, *, capture):
        return self.inner.run(state, rows, [*hooks, self], capture=capture)

    def on_layer(self, queries):
        self.rows.append(queries.rows.tolist())


def files(store) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in store.folder.rglob("*.safetensors")}
