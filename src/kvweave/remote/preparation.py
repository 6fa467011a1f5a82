"""Prepares chunks in vLLM: recipes are given a preparation that sends chunks there, and notes here which ones were sent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Final, cast

from kvweave.kvstore.keys import DIGEST_BYTES, digest_tokens
from kvweave.models.engine import Engine
from kvweave.recipes.context import Ids, PrepareContext, StoreEntry
from kvweave.recipes.features import ENTRY_OVERHEAD_BYTES, FeatureExtractor
from kvweave.recipes.names import displayed, parse
from kvweave.recipes.offline import extractors_of
from kvweave.recipes.prepare import NotPrepared, Prepare, PreparedChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import SelectNone
from kvweave.remote.model import RemoteModel
from kvweave.types import ChunkFeature, KVProvenance

SENT: Final = "sent"
"""The kind of a note, an entry without tensors, that vLLM has prepared a chunk."""
_MOST_NOTES: Final = 4  # of one chunk, for several recipes; those for earlier addresses go


@dataclass(frozen=True, slots=True)
class NotesOfPrepared(FeatureExtractor):
    """Lets the servers of a RemoteModel prepare chunks; the feature of a chunk is the note that they did.

    Attributes:
        recipe: the name of a recipe that prepares so.
        prepare: its preparation.
        features: what names the features that it prepares beside KV.
    """

    recipe: str
    prepare: Prepare
    features: str

    def provenance(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Return one that names the prefix, the servers and what they store: recipes that store the same share a note."""
        kinds = [each.kind for each in self.prepare.provenances(adapter, prefix, chunk_tokens)[:1]]
        said = " ".join([_remote(adapter).place, *kinds, self.features])
        named = blake2b(said.encode(), digest_size=DIGEST_BYTES).hexdigest()
        return KVProvenance(SENT, (digest_tokens(prefix), named), exact=False)

    def extract(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Send chunk after chunk; yield the note of each one that was prepared. Raises as `RemoteModel.prepare`."""
        for chunk in chunks:
            _remote(ctx.adapter).prepare(self.recipe, ctx.prefix, chunk, ctx.corpus)
            provenance = self.provenance(ctx.adapter, ctx.prefix, len(chunk))
            yield StoreEntry(ChunkFeature(chunk, {}), provenance, (digest_tokens(chunk),), _MOST_NOTES)

    def bytes(self, adapter: Engine, chunk_tokens: int) -> int:
        """Return a bound on the note alone: the KV is stored by vLLM."""
        return ENTRY_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class PreparedByVllm(Prepare):
    """Computes and stores no KV here."""

    notes: NotesOfPrepared

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return nothing."""
        return ()

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Never called, since there is no provenance."""
        raise AssertionError("KV that vLLM computes was to be computed here")

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The notes."""
        return (self.notes,)


def prepared_by_vllm(recipe: Recipe) -> Recipe:
    """Return a recipe whose chunks vLLM prepares, in the recipe's storage; one that prepares nothing is unchanged."""
    if recipe.prepare == NotPrepared():
        return recipe
    named = parse(recipe.name)
    name = displayed(named.method, named.preparation, named.storage or recipe.prepare.storage)
    notes = NotesOfPrepared(name, recipe.prepare, repr(extractors_of(recipe)))
    return replace(recipe, prepare=PreparedByVllm(notes), select=SelectNone())


def _remote(adapter: object) -> RemoteModel:
    return cast(RemoteModel, adapter)
