"""What the contract tests have in common: preparing without an embedding model, and what plain full attention gives."""

import hashlib

import numpy as np
import torch

from kvweave.recipes.context import ChunkList, PrepareContext
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import run
from kvweave.recipes.simulated_requests import attention_key
from kvweave.types import ChunkFeature

TOLERANCE = 1e-4
SELECTING = [name for name in METHODS if recipe_named(name).select.selects]


def plain_logits(adapter, prompt):
    """(1, vocab), by an ordinary call of the model."""
    tokens = adapter.template.render(prompt)
    adapter.rotation.reset_lengths()
    with torch.no_grad():
        return adapter.model(torch.tensor([tokens.token_ids]), use_cache=False, logits_to_keep=1).logits[
            :, -1
        ]


def close(a, b):
    torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def corpus_of(adapter, prompt):
    """Likeness by length, so that no embedding model is needed."""
    return ChunkList(
        [prompt.chunks],
        adapter.template.chunk_ids,
        lambda texts: np.array([[len(t), 1.0] for t in texts], dtype=np.float32),
    )


def shop_of(adapter, store, prompt):
    return PrepareContext(
        adapter, store, adapter.template.prefix_ids(prompt.system), corpus_of(adapter, prompt)
    )


def prepare(adapter, store, prompt, recipe, chunks=slice(None)):
    """Some of a prompt's chunks for a recipe or a name."""
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    ids = [adapter.template.chunk_ids(text) for text in prompt.chunks[chunks]]
    return prepare_chunks(shop_of(adapter, store, prompt), ids, recipe)


def prefilled(adapter, store, prompt, name, **budget):
    """Without storing what it leaves."""
    return run(recipe_named(name), adapter, store, adapter.template.render(prompt), **budget)


def entries(adapter, store, prompt):
    """All KV of the system prefix and the chunks, by tokens and making, as the store hands it out."""
    ids = [tuple(adapter.template.chunk_ids(text)) for text in prompt.chunks]
    ids.append(tuple(adapter.template.prefix_ids(prompt.system)))
    made = store.versions(adapter.fingerprint, ids)
    found = {}
    for chunk, provenances in zip(ids, made, strict=True):
        for provenance in provenances:
            found[chunk, provenance] = store.get(adapter.fingerprint, chunk, provenance).kv
    return found


def features(adapter, store, prompt, recipe):
    """All notes that a recipe has about the chunks, by tokens, making and name."""
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


class Counted:
    """A recompute slot that notes which rows each layer computes."""

    def __init__(self, inner):
        self.inner, self.rows = inner, []

    def run(self, state, rows, hooks, *, capture):
        return self.inner.run(state, rows, [*hooks, self], capture=capture)

    def see(self, queries):
        self.rows.append(queries.rows.tolist())


def files(store) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in store.folder.rglob("*.safetensors")}
