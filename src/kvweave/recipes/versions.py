"""What is stored of a chunk behind other chunks, with what was noted about each version."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.models.adapter import Adapter
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.prepare import Isolated, Prepare, Prepared
from kvweave.recipes.request import PrefillRequest
from kvweave.recipes.simulated_requests import (
    SimulatedRequests,
    StoredAttention,
    attention_key,
    stored_attention,
)
from kvweave.types import KVProvenance


@dataclass(frozen=True, slots=True)
class Version:
    """Exact KV of a chunk: how it was made, the digests of the chunks before it then, and its attention then."""

    provenance: KVProvenance
    behind: tuple[str, ...]
    attention: StoredAttention


def stored_versions(request: PrefillRequest, spans: Sequence[int]) -> list[list[Version]]:
    """For each of some chunks of a prompt what is stored behind the same system prefix and other chunks.

    Those without a note are left out. Reads the notes, and no KV.
    """
    ids = [request.prompt.ids(request.prompt.spans[number]) for number in spans]
    listed = request.store.versions(request.adapter.fingerprint, ids)
    wanted = [
        (number, provenance)
        for number, made in enumerate(listed)
        for provenance in made
        if provenance.exact and chunks_behind(request, provenance)
    ]
    features = request.store.find_features(
        request.adapter.fingerprint,
        [(ids[number], attention_key(provenance)) for number, provenance in wanted],
    )
    found: list[list[Version]] = [[] for _ in ids]
    for (number, provenance), feature in zip(wanted, features, strict=True):
        behind = chunks_behind(request, provenance)
        attention = stored_attention(feature, len(behind))
        if attention is not None:
            found[number].append(Version(provenance, behind, attention))
    return found


def chunks_behind(request: PrefillRequest, provenance: KVProvenance) -> tuple[str, ...]:
    """Digests of the chunks that KV made so stood behind; none if it did not stand behind this prompt's prefix."""
    prefix = request.system_path
    return provenance.context[len(prefix) :] if provenance.context[: len(prefix)] == prefix else ()


@dataclass(frozen=True, slots=True)
class RequestVersions(Prepare):
    """Exact KV behind other chunks, at most `most` versions of each; the isolated one is the version behind none.

    In a prompt, a version v of a chunk is worth the more the more of its attention went to chunks that stand before it
    here as well: with E the chunks before it here, E(v) those before it when v was made, and a(v, p) the share of
    attention that its tokens paid to chunk p then,

        value(v) = Σ a(v, p) over p in E(v) ∩ E  −  Σ a(v, p) over p in E(v) without E

    which is 0 for the isolated one. The best version is taken; in a tie the one whose context's digests come first.
    """

    most: int = 5
    rehearsals: int = 3

    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """The isolated one: it is known before any other."""
        return Isolated().provenances(adapter, prefix, chunk_tokens)

    def make(self, ctx: PrepareContext, chunk: Ids) -> Prepared:
        """As Isolated."""
        return Isolated().make(ctx, chunk)

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Rehearsals that keep their KV."""
        return (SimulatedRequests(self.rehearsals, max_versions=self.most),)

    @property
    def max_versions(self) -> int | None:
        """Of each chunk."""
        return self.most

    def accepted(self, request: PrefillRequest, spans: Sequence[int]) -> list[tuple[KVProvenance, ...]]:
        """All versions behind this prompt's system prefix, the best first; one query for them, one for their notes."""
        isolated = Isolated().accepted(request, spans)
        found = []
        for number, alone, versions in zip(spans, isolated, stored_versions(request, spans), strict=True):
            here = frozenset(request.chunks_before(number))
            valued = [(_value(version, here), version.provenance) for version in versions]
            valued += [(0.0, provenance) for provenance in alone]
            valued.sort(key=lambda each: (-each[0], each[1].context))
            found.append(tuple(provenance for _, provenance in valued))
        return found


def _value(version: Version, here: frozenset[str]) -> float:
    paid = zip(version.behind, version.attention.inter.mean(dim=1).tolist(), strict=True)
    return math.fsum(share if chunk in here else -share for chunk, share in paid)
