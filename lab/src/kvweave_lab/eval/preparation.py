"""A sample on a model: its prompt, whether it fits, and its chunk KV.

Chunk KV is prepared as a knowledge base with the sample's documents and a few others would prepare it. Preparations
that look at other chunks find more than the prompt's: neighbours by meaning come from all documents, and simulated
requests contain as many other chunks. Half of the chunks in a simulated request are then chunks of the prompt, as if
earlier requests had combined some of them. That favours features from simulated requests.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

from kvweave.embedding import TextEncoder
from kvweave.errors import PromptTooLong
from kvweave.kvstore.format import Content
from kvweave.kvstore.keys import EntryKey, LookUp
from kvweave.kvstore.kv_store import KVStore
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.kvstore.tiers.leases import Lease
from kvweave.models.adapter import Adapter
from kvweave.recipes.context import ChunkList, Corpus, Ids, PrepareContext, Vectors
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare_chunks
from kvweave.recipes.recipe import Recipe
from kvweave.types import KVProvenance, Prompt, Storage, TokenizedPrompt
from kvweave_lab.eval.outcomes import REUSE
from kvweave_lab.eval.samples import Sample


def render(adapter: Adapter, sample: Sample) -> TokenizedPrompt:
    """Return a sample's prompt; raises PromptTooLong if prompt and answer are too long for the model."""
    prompt = adapter.template.render(Prompt(sample.question, sample.chunks))
    try:
        adapter.check_length(prompt.tokens, sample.max_new_tokens)
    except PromptTooLong as error:
        raise PromptTooLong(f"{sample.name}: {error}") from error
    return prompt


def too_long(adapter: Adapter, samples: Sequence[Sample]) -> frozenset[str]:
    """Return the names of the samples that are too long for the model; raises PromptTooLong if all are."""
    found = frozenset(sample.name for sample in samples if not _fits(adapter, sample))
    if samples and len(found) == len(samples):
        raise PromptTooLong(
            f"none of the {len(samples)} prompts fits the {adapter.geometry.context_tokens} tokens that"
            f" {adapter.fingerprint.name} takes, answer included; take a shorter context or another --model"
        )
    return found


def _fits(adapter: Adapter, sample: Sample) -> bool:
    try:
        render(adapter, sample)
    except PromptTooLong:
        return False
    return True


_ENCODER = TextEncoder()  # loads its model with the first text that a preparation compares


def prepare_sample(
    adapter: Adapter, store: KVStore, sample: Sample, prompt: TokenizedPrompt, recipe: Recipe
) -> None:
    """Store the system prefix, and what the recipe prepares and extracts of the sample's chunks."""
    others = _other_chunks(adapter, sample) if simulates_requests(recipe) else []
    prepare_prompt(
        adapter, store, prompt, recipe, corpus_of(adapter, [*sample.documents, *sample.others]), others
    )


def prepare_prompt(
    adapter: Adapter,
    store: KVStore,
    prompt: TokenizedPrompt,
    recipe: Recipe,
    corpus: Corpus,
    others: Sequence[Ids] = (),
) -> None:
    """Store the system prefix, and what the recipe prepares and extracts of a prompt's chunks and of some `others`."""
    system, *chunks = (prompt.ids(span) for span in prompt.spans[:-1])
    ctx = PrepareContext(adapter, store, system, corpus)
    if system:
        ctx.prefix_kv()
    prepare_chunks(ctx, [*chunks, *others], recipe)


class PromptStore(MemoryStore):
    """Entries for one prompt in memory, on top of another store, whose entries are found here too and are not copied."""

    def __init__(self, base: KVStore) -> None:
        super().__init__()
        self._base, self.namespace = base, base.namespace

    def lease(self) -> Lease:
        return self._base.lease()

    def _find(
        self, look_ups: Sequence[LookUp], lease: Lease | None, *, whole: bool = False
    ) -> list[tuple[EntryKey, Content] | None]:
        own = super()._find(look_ups, lease, whole=whole)
        theirs = self._base._find(look_ups, lease, whole=whole)
        return [_first_choice(*each) for each in zip(look_ups, own, theirs, strict=True)]

    def _listed(self, keys: Sequence[str]) -> Collection[str]:
        return {*super()._listed(keys), *self._base._listed(keys)}

    def _versions(self, model: str, chunks: Sequence[str]) -> Mapping[str, list[KVProvenance]]:
        own, theirs = super()._versions(model, chunks), self._base._versions(model, chunks)
        return {chunk: [*own.get(chunk, ()), *theirs.get(chunk, ())] for chunk in chunks}

    def _prefetch(self, wanted: Sequence[Sequence[EntryKey]], lease: Lease) -> None:
        self._base._prefetch(wanted, lease)


def _first_choice(
    look_up: LookUp, *found: tuple[EntryKey, Content] | None
) -> tuple[EntryKey, Content] | None:
    """Return which of these comes first among the candidates; exact KV may be among them by two names."""
    keys = [key.digest for key in look_up.candidates]
    there = [each for each in found if each is not None]
    return min(there, key=lambda each: keys.index(each[0].digest), default=None)


class OtherDocuments:
    """KV of the system prefix, and isolated KV of the other documents' chunks, which samples of a task share.

    It stays in memory as long as the next sample has some of the same other documents.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._prefixes = MemoryStore()
        # Each document in every storage in which a recipe asked for it.
        self._documents: frozenset[tuple[Storage, Sequence[str]]] = frozenset()
        self._isolated = MemoryStore()

    def store(self, sample: Sample, prompt: TokenizedPrompt, recipe: Recipe) -> MemoryStore:
        """Return a sample's own store with its initial content. It has other documents only if the recipe's preparation uses them."""
        system = prompt.ids(prompt.spans[0])
        if system:
            PrepareContext(self._adapter, self._prefixes, system).prefix_kv()
        if not sample.others or not (recipe.prepare.entry_count > 1 or simulates_requests(recipe)):
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


def corpus_of(adapter: Adapter, documents: Sequence[Sequence[str]]) -> ChunkList:
    """Return documents, each a list of chunk texts, as preparations need them."""
    return ChunkList(documents, adapter.template.chunk_ids, _vectors)


def _other_chunks(adapter: Adapter, sample: Sample) -> list[Ids]:
    """Return as many chunks of other documents as the sample has: the first of each, then the second of each, …"""
    turns = itertools.chain(*itertools.zip_longest(*sample.others))
    texts = itertools.islice((text for text in turns if text is not None), len(sample.chunks))
    return [tuple(adapter.template.chunk_ids(text)) for text in texts]


def simulates_requests(recipe: Recipe) -> bool:
    """Return whether the recipe depends on which chunks are prepared together."""
    return any(
        extractor.across_chunks for extractor in (*recipe.prepare.extractors, *recipe.select.extractors)
    )


def _vectors(texts: Sequence[str]) -> Vectors:
    return np.stack([_vector(text) for text in texts])


@lru_cache(maxsize=4096)
def _vector(text: str) -> Vectors:
    vector: Vectors = _ENCODER.encode([text])[0]
    return vector
