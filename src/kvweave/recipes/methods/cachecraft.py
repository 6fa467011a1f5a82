"""Cache-Craft: versions of a chunk behind other chunks, and the tokens that lean on chunks that are not there."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Matched
from kvweave.recipes.select import Highest
from kvweave.recipes.simulated_requests import (
    SimulatedRequests,
    StoredAttention,
    attention_key,
    stored_attention,
)
from kvweave.recipes.state import PrefillState
from kvweave.recipes.versions import RequestVersions, chunks_behind
from kvweave.types import ChunkFeature


@dataclass(frozen=True, slots=True)
class InterAttention:
    """How much a token leans on chunks that its stored KV has wrong, as recorded; no pass of the model.

    With E the chunks before its chunk in this prompt, E(v) those before it when the stored version v was made, a(v, p, t)
    the share of its attention that token t paid to chunk p then, and m(t) what it pays to one earlier chunk on the mean
    over rehearsed requests,

        score(t) = Σ a(v, p, t) over p in E(v) without E  +  |E without E(v)| · m(t)

    The more of its context a version shares with this prompt, the lower its tokens score. KV that was made behind no
    other chunk has an empty E(v). Where m was not recorded, the mean over E(v) stands for it, and where that is empty the
    mean of m over the prompt's other stale tokens, since nothing speaks for leaving these ones out: 1 if it is known of
    none. In which order chunks stood before the version, or stand here, does not matter.
    """

    rehearsed: SimulatedRequests = field(default_factory=SimulatedRequests)
    adds_up: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """m, of every chunk."""
        return (self.rehearsed,)

    def scores(self, state: PrefillState) -> Tensor:
        """Two notes for each chunk, one look-up for all."""
        request = state.request
        stale = [(number, m) for number, m in enumerate(state.matched) if m.origin == "reused"]
        wanted = []
        for _, found in stale:
            assert found.provenance is not None
            ids = request.prompt.ids(found.span)
            wanted.append((ids, self.rehearsed.provenance(request.adapter, request.prefix, len(ids))))
            wanted.append((ids, attention_key(found.provenance)))
        features = request.store.find_features(request.adapter.fingerprint, wanted)
        stood = [_stood(state, *each) for each in zip(stale, features[::2], features[1::2], strict=True)]
        known = [one.usual for one in stood if one.usual is not None]
        otherwise = float(torch.cat(known).mean()) if known else 1.0
        return torch.cat([one.leaning(otherwise) for one in stood])


@dataclass(frozen=True, slots=True)
class _Stood:
    """What is known of one chunk's n tokens.

    `absent` is how many chunks before it are not in its stored KV, `foreign` (n,) its attention to those that are and
    should not be, `usual` (n,) is m; None where neither was recorded.
    """

    tokens: int
    absent: int
    foreign: Tensor
    usual: Tensor | None

    def leaning(self, otherwise: float) -> Tensor:
        """The scores, (n,), with a value for an unknown m."""
        usual = self.usual if self.usual is not None else torch.full((self.tokens,), otherwise)
        return self.foreign + self.absent * usual


def _stood(
    state: PrefillState, stale: tuple[int, Matched], mean: ChunkFeature | None, version: ChunkFeature | None
) -> _Stood:
    number, found = stale
    assert found.provenance is not None
    here, tokens = set(state.request.chunks_before(number)), found.span.tokens
    then = chunks_behind(state.request, found.provenance) if found.provenance.exact else ()
    attention = stored_attention(version, len(then)) if then else None
    foreign = torch.zeros(tokens)
    if attention is not None:
        places = [place for place, chunk in enumerate(then) if chunk not in here]
        foreign = attention.inter[places].sum(dim=0)
    return _Stood(tokens, len(here.difference(then)), foreign, _usual(mean, attention))


def _usual(mean: ChunkFeature | None, attention: StoredAttention | None) -> Tensor | None:
    """m, (n,), if one of the two notes tells it."""
    if mean is not None:
        return mean.tensors["inter"]
    return attention.inter.mean(dim=0) if attention is not None else None


def cachecraft() -> Recipe:
    """Keep KV of a chunk behind several sets of other chunks; take the version that fits best, recompute what leans on others.

    Paper: Cache-Craft (chunk versions, prefix overlap, inter and intra attention), as FusionRAG §1.1 and CacheClip §5
        describe it.
    Idea: KV from a real request is right as far as the chunks before it are the same; attention recorded then tells
        which of its tokens the other chunks had a part in.
    Parameters: at most 5 versions of a chunk, 3 of them from requests rehearsed while it is prepared; ratio 0.15.
    Differs from the paper: only exact KV becomes a version, never rows computed behind stale ones; versions are there
        before the first question; what a missing chunk would change is estimated from rehearsals; the order of the earlier
        chunks counts neither for the choice of a version nor for the scores; the budget goes to all chunks together
        instead of a share of each chunk.
    Relations: `prefix` takes a version only if its whole path is the same; `--prepare observed` gives the versions to
        any recipe, `--prepare isolated` takes them away; `prophetkv` asks the question, which this does not need.
    Measured: see the methods page.
    """
    return Recipe(
        "cachecraft",
        prepare=RequestVersions(),
        match=MatchPathThenChunk(),
        select=Highest(InterAttention()),
        ratio=0.15,
    )
