"""Cache-Craft: versions of a chunk after other chunks, and the tokens that depend on chunks that are not in the prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.features import FeatureExtractor, StoredAttention, attention_key, stored_attention
from kvweave.recipes.match import MatchPathThenChunk, preceding_chunks
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Isolated, Prepare, PreparedChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.recipes.select import TopScores
from kvweave.recipes.simulated_requests import SimulatedRequests
from kvweave.types import ChunkFeature, KVProvenance


def cachecraft() -> Recipe:
    """Keep KV of a chunk after several sets of other chunks, use the version that fits best, and recompute dependent tokens.

    Paper: Cache-Craft (arXiv 2502.15734): chunk versions, prefix overlap, inter and intra attention, as FusionRAG (arXiv
        2601.12904) §1.1 and CacheClip (arXiv 2510.10129) §5 describe it.
    Idea: KV from a real request is right to the degree that the chunks before it are the same. Recorded attention shows which
        of its tokens the other chunks influenced.
    Parameters: at most 5 versions of a chunk, 3 of them from requests simulated while it is prepared; ratio 0.15.
    Differs from the paper: only exact KV becomes a version, never rows computed after stale ones. There are versions before
        the first question. What a missing chunk would change is estimated from simulated requests. The order of the earlier
        chunks counts neither for the choice of a version nor for the scores. All chunks share one budget, instead of each
        getting a share.
    Relations: `prefix` uses a version only if its whole path is the same; `--prepare observed` gives the versions to
        any recipe, `--prepare isolated` takes them away; `prophetkv` runs the question, which this recipe does not need.
    """
    return Recipe(
        "cachecraft",
        prepare=RequestVersions(),
        match=MatchPathThenChunk(),
        select=TopScores(InterAttention()),
        ratio=0.15,
    )


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


def _value(version: Version, before: frozenset[str]) -> float:
    paid = zip(version.preceding, version.attention.inter.mean(dim=1).tolist(), strict=True)
    return math.fsum(share if chunk in before else -share for chunk, share in paid)


@dataclass(frozen=True, slots=True)
class InterAttention:
    """How much a token attends to chunks that its stored KV has wrong, as recorded; runs no pass of the model.

    E are the chunks before its chunk in this prompt, E(v) those before it when the stored version v was computed.
    a(v, p, t) is the share of its attention that token t paid to chunk p then, and m(t) what it pays to one earlier chunk
    on average over simulated requests:

        score(t) = Σ a(v, p, t) over p in E(v) without E  +  |E without E(v)| · m(t)

    The more of its context a version shares with this prompt, the lower its tokens score. E(v) is empty for KV
    computed after no other chunk. Where m was not recorded, the mean over E(v) replaces it. Where E(v) is empty too,
    the mean of m over the prompt's other stale tokens replaces it, or 1 if m is known of none: nothing justifies
    leaving these tokens out. The order of the chunks does not matter.
    """

    simulated: SimulatedRequests = field(default_factory=SimulatedRequests)
    supports_coverage: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """m, of every chunk."""
        return (self.simulated,)

    def scores(self, state: PrefillState) -> Tensor:
        """Read two features for each chunk, in one look-up."""
        request = state.request
        stale = [(number, m) for number, m in enumerate(state.matched) if m.origin == "reused"]
        wanted = []
        for _, found in stale:
            assert found.provenance is not None
            ids = request.prompt.ids(found.span)
            wanted.append((ids, self.simulated.provenance(request.adapter, request.prefix, len(ids))))
            wanted.append((ids, attention_key(found.provenance)))
        features = request.store.find_features(request.adapter.fingerprint, wanted)
        chunks = [
            _chunk_attention(state, *each) for each in zip(stale, features[::2], features[1::2], strict=True)
        ]
        known = [chunk.usual for chunk in chunks if chunk.usual is not None]
        otherwise = float(torch.cat(known).mean()) if known else 1.0
        return torch.cat([chunk.scores(otherwise) for chunk in chunks])


@dataclass(frozen=True, slots=True)
class _ChunkAttention:
    """What is known of one chunk's n tokens.

    Attributes:
        tokens: n.
        absent: how many chunks before it in this prompt were not before it in its stored KV, |E without E(v)|.
        foreign: (n,) attention to chunks that were before it then and are not in this prompt.
        usual: (n,) m; None where neither feature tells it.
    """

    tokens: int
    absent: int
    foreign: Tensor
    usual: Tensor | None

    def scores(self, otherwise: float) -> Tensor:
        """Return the scores (n,), with a value for an unknown m."""
        usual = self.usual if self.usual is not None else torch.full((self.tokens,), otherwise)
        return self.foreign + self.absent * usual


def _chunk_attention(
    state: PrefillState, stale: tuple[int, Matched], mean: ChunkFeature | None, version: ChunkFeature | None
) -> _ChunkAttention:
    number, found = stale
    assert found.provenance is not None
    here, tokens = set(state.request.chunks_before(number)), found.span.tokens
    then = preceding_chunks(state.request, found.provenance) if found.provenance.exact else ()
    attention = stored_attention(version, len(then)) if then else None
    foreign = torch.zeros(tokens)
    if attention is not None:
        places = [place for place, chunk in enumerate(then) if chunk not in here]
        foreign = attention.inter[places].sum(dim=0)
    return _ChunkAttention(tokens, len(here.difference(then)), foreign, _usual(mean, attention))


def _usual(mean: ChunkFeature | None, attention: StoredAttention | None) -> Tensor | None:
    """Return m, (n,), if one of the two features tells it."""
    if mean is not None:
        return mean.tensors["inter"]
    return attention.inter.mean(dim=0) if attention is not None else None
