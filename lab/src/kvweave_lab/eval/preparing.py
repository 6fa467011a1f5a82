"""Chunk KV of one sample, made as a knowledge base would make it that holds its documents among a few others.

What is prepared with other chunks in view finds more than those of the prompt there: neighbours by meaning come from
all documents, and what is rehearsed is rehearsed in company of as many other chunks. Half of a chunk's company are then
chunks of its prompt, as if earlier requests had brought some of them together: that favours what is rehearsed.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from kvweave.embedding import TextEncoder
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import ChunkList, Ids, PrepareContext, Vectors
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.types import Storage, TokenizedPrompt
from kvweave_lab.eval.results import REUSE
from kvweave_lab.eval.samples import Sample

_ENCODER = TextEncoder()  # loads its model with the first text that a preparation compares


def prepare_sample(
    adapter: Adapter, store: ChunkStore, sample: Sample, prompt: TokenizedPrompt, recipe: Recipe
) -> None:
    """Store the system prefix, and what the recipe prepares and records of the sample's chunks."""
    system, *chunks = (prompt.ids(span) for span in prompt.spans[:-1])
    ctx = PrepareContext(adapter, store, system, _corpus(adapter, sample))
    if system:
        ctx.prefix_kv()
    together = [*chunks, *_company(adapter, sample)] if _rehearses(recipe) else chunks
    prepare_chunks(ctx, together, recipe)


class OtherDocuments:
    """KV of the system prefix, and isolated KV of the other documents' chunks: samples of a task share these.

    Kept as long as the next sample has some of the same documents beside it.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._prefixes = MemoryStore()
        self._documents: frozenset[tuple[Storage, Sequence[str]]] = (
            frozenset()
        )  # each in every storage it was asked for in
        self._isolated = MemoryStore()

    def store(self, sample: Sample, prompt: TokenizedPrompt, recipe: Recipe) -> MemoryStore:
        """What a sample's own store begins with; of the other documents only where the recipe prepares behind them or with them."""
        system = prompt.ids(prompt.spans[0])
        if system:
            PrepareContext(self._adapter, self._prefixes, system).prefix_kv()
        if not sample.others or not (recipe.prepare.entries > 1 or _rehearses(recipe)):
            return self._prefixes
        storage = recipe.prepare.storage
        if frozenset(sample.others).isdisjoint(document for _, document in self._documents):
            self._documents, self._isolated = frozenset(), MemoryStore(self._prefixes)
        others = frozenset((storage, document) for document in sample.others)
        if not others <= self._documents:
            chunks = (self._adapter.template.chunk_ids(text) for text in itertools.chain(*sample.others))
            isolated = recipe_named(REUSE, storage=storage)
            prepare_chunks(PrepareContext(self._adapter, self._isolated, system), chunks, isolated)
            self._documents |= others
        return self._isolated


def _corpus(adapter: Adapter, sample: Sample) -> ChunkList:
    return ChunkList([*sample.documents, *sample.others], adapter.template.chunk_ids, _vectors)


def _company(adapter: Adapter, sample: Sample) -> list[Ids]:
    """As many chunks of other documents as the sample has, from the first of each, then the second of each, …"""
    turns = itertools.chain(*itertools.zip_longest(*sample.others))
    texts = itertools.islice((text for text in turns if text is not None), len(sample.chunks))
    return [tuple(adapter.template.chunk_ids(text)) for text in texts]


def _rehearses(recipe: Recipe) -> bool:
    return any(record.together for record in (*recipe.prepare.extractors, *recipe.select.extractors))


def _vectors(texts: Sequence[str]) -> Vectors:
    return np.stack([_vector(text) for text in texts])


@lru_cache(maxsize=4096)
def _vector(text: str) -> Vectors:
    vector: Vectors = _ENCODER.encode([text])[0]
    return vector
