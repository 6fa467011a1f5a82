"""Several exact versions of a chunk's KV, each computed after other chunks, and which version fits a prompt best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.models.adapter import Adapter
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.features import FeatureExtractor, StoredAttention, attention_key, stored_attention
from kvweave.recipes.prepare import Isolated, Prepare, PreparedChunk
from kvweave.recipes.request import PrefillRequest
from kvweave.recipes.simulated_requests import SimulatedRequests
from kvweave.types import KVProvenance


@dataclass(frozen=True, slots=True)
class RequestVersions(Prepare):
    """Exact KV after other chunks, from real and simulated requests: at most `limit` versions of each chunk.

    A version v of a chunk is worth more in a prompt if its attention went to chunks that come before it there as well.
    E are the chunks before it in the prompt, E(v) those before it when v was computed, and a(v, p) is the share of
    attention that its tokens paid to chunk p then:

        value(v) = Σ a(v, p) over p in E(v) ∩ E  −  Σ a(v, p) over p in E(v) without E

    The isolated version has value 0. The version of the highest value is used; ties go to the one whose context's digests
    come first.

    Attributes:
        limit: versions kept of each chunk.
        rounds: how often each chunk takes part in a simulated request.
    """

    limit: int = 5
    rounds: int = 3

    def provenances(self, adapter: Adapter, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return the isolated one, the only one known before any request."""
        return Isolated().provenances(adapter, prefix, chunk_tokens)

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        """Compute isolated KV."""
        return Isolated().compute(ctx, chunk)

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Simulated requests whose KV is kept."""
        return (SimulatedRequests(self.rounds, max_versions=self.limit),)

    @property
    def max_versions(self) -> int | None:
        """The limit."""
        return self.limit

    def candidates(self, request: PrefillRequest, spans: Sequence[int]) -> list[tuple[KVProvenance, ...]]:
        """Return all versions after this prompt's system prefix, best first; two queries, of versions and features."""
        isolated = Isolated().candidates(request, spans)
        found = []
        for number, alone, versions in zip(spans, isolated, stored_versions(request, spans), strict=True):
            before = frozenset(request.chunks_before(number))
            valued = [(_value(version, before), version.provenance) for version in versions]
            valued += [(0.0, provenance) for provenance in alone]
            valued.sort(key=lambda each: (-each[0], each[1].context))
            found.append(tuple(provenance for _, provenance in valued))
        return found


@dataclass(frozen=True, slots=True)
class Version:
    """One exact KV entry of a chunk: its provenance, the digests of the chunks before it, and its attention."""

    provenance: KVProvenance
    preceding: tuple[str, ...]
    attention: StoredAttention


def stored_versions(request: PrefillRequest, spans: Sequence[int]) -> list[list[Version]]:
    """Return for each of some chunk spans the stored versions after the same system prefix and other chunks.

    Versions without a feature of their attention are left out. Reads features, but no KV.
    """
    ids = [request.prompt.ids(request.prompt.spans[number]) for number in spans]
    listed = request.store.versions(request.adapter.fingerprint, ids)
    wanted = [
        (number, provenance)
        for number, provenances in enumerate(listed)
        for provenance in provenances
        if provenance.exact and preceding_chunks(request, provenance)
    ]
    features = request.store.find_features(
        request.adapter.fingerprint,
        [(ids[number], attention_key(provenance)) for number, provenance in wanted],
    )
    found: list[list[Version]] = [[] for _ in ids]
    for (number, provenance), feature in zip(wanted, features, strict=True):
        preceding = preceding_chunks(request, provenance)
        attention = stored_attention(feature, len(preceding))
        if attention is not None:
            found[number].append(Version(provenance, preceding, attention))
    return found


def preceding_chunks(request: PrefillRequest, provenance: KVProvenance) -> tuple[str, ...]:
    """Return the digests of the chunks that this KV was computed after; none if not after this prompt's prefix."""
    prefix = request.system_path
    return provenance.context[len(prefix) :] if provenance.context[: len(prefix)] == prefix else ()


def _value(version: Version, before: frozenset[str]) -> float:
    paid = zip(version.preceding, version.attention.inter.mean(dim=1).tolist(), strict=True)
    return math.fsum(share if chunk in before else -share for chunk, share in paid)
