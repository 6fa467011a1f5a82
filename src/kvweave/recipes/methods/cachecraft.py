"""Cache-Craft: versions of a chunk after other chunks, and the tokens that depend on chunks that are not in the prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.models.engine import Engine
from kvweave.recipes.context import Ids, PrepareContext
from kvweave.recipes.features import FeatureExtractor, attention_key, attention_to_earlier
from kvweave.recipes.match import preceding_chunks
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Isolated, Prepare, PreparedChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.recipes.select import Score, TopScores
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
        select=TopScores(InterAttention()),
        ratio=0.15,
    )


@dataclass(frozen=True, slots=True)
class RequestVersions(Prepare):
    """Exact KV after other chunks, from real and simulated requests: at most `max_versions` of each chunk.

    A version v of a chunk is worth more in a prompt if its attention went to chunks that come before it there as well.
    E are the chunks before it in the prompt, E(v) those before it when v was computed, and a(v, p) is the share of
    attention that its tokens paid to chunk p then:

        value(v) = Σ a(v, p) over p in E(v) ∩ E  −  Σ a(v, p) over p in E(v) without E

    The isolated version has value 0. The version of the highest value is used; ties go to the one whose context's digests
    come first.

    Attributes:
        max_versions: versions kept of each chunk.
        rounds: how often each chunk takes part in a simulated request.
    """

    max_versions: int = 5
    rounds: int = 3

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return the isolated one, the only one known before any request."""
        return Isolated().provenances(adapter, prefix, chunk_tokens)

    def compute(self, ctx: PrepareContext, chunk: Ids) -> PreparedChunk:
        return Isolated().compute(ctx, chunk)

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """Simulated requests whose KV is kept."""
        return (SimulatedRequests(self.rounds, max_versions=self.max_versions),)

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
    """One exact KV entry of a chunk: its provenance, the digests of the P chunks before it, and attention to them (P, n)."""

    provenance: KVProvenance
    preceding: tuple[str, ...]
    attention: Tensor


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
        attention = attention_to_earlier(feature, len(preceding))
        if attention is not None:
            found[number].append(Version(provenance, preceding, attention))
    return found


def _value(version: Version, before: frozenset[str]) -> float:
    paid = zip(version.preceding, version.attention.mean(dim=1).tolist(), strict=True)
    return math.fsum(share if chunk in before else -share for chunk, share in paid)


@dataclass(frozen=True, slots=True)
class InterAttention(Score):
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
        chunks = [_known(state, *each) for each in zip(stale, features[::2], features[1::2], strict=True)]
        told = [usual for _, _, usual in chunks if usual is not None]
        otherwise = torch.cat(told).mean() if told else torch.ones(())
        return torch.cat(
            [foreign + absent * (otherwise if m is None else m) for foreign, absent, m in chunks]
        )


def _known(
    state: PrefillState, stale: tuple[int, Matched], mean: ChunkFeature | None, version: ChunkFeature | None
) -> tuple[Tensor, int, Tensor | None]:
    """Return what is known of one chunk's n tokens.

    The attention (n,) that they paid to chunks that are not in this prompt; |E without E(v)|; and m (n,), None where
    neither feature tells it.
    """
    number, found = stale
    assert found.provenance is not None
    here = set(state.request.chunks_before(number))
    then = preceding_chunks(state.request, found.provenance) if found.provenance.exact else ()
    inter = attention_to_earlier(version, len(then)) if then else None
    foreign = torch.zeros(found.span.tokens)
    if inter is not None:
        foreign = inter[[place for place, chunk in enumerate(then) if chunk not in here]].sum(dim=0)
    usual = inter.mean(dim=0) if inter is not None else None
    return foreign, len(here.difference(then)), usual if mean is None else mean.tensors["inter"]
