"""weave: recompute what the question attends to and what depends on earlier text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvweave.models.engine import Engine
from kvweave.recipes.context import Ids, PrepareContext, StoreEntry
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import (
    PreparedChunk,
    Previous,
    WithNeighbours,
    encode_after,
    fitting,
    isolated_kv,
    isolated_provenance,
)
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import QuestionAttention, TopScores
from kvweave.recipes.shift import ShiftedRows
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance


def weave() -> Recipe:
    """Our own: chunks prepared after similar ones and the one before them, selected by attention times context sensitivity.

    Paper: none; parts of FusionRAG (arXiv 2601.12904) §3.1 (similar chunks), ProphetKV (arXiv 2602.02579) §4.2 (the question
        over stale KV) and CacheBlend (arXiv 2405.16444, how far KV is off), combined in another way.
    Idea: a token's KV is worth recomputing if the question attends to it and if recomputation would change it. Attention over
        stale KV shows the first. The second is measured at indexing time: a chunk is prefilled alone, and once more after
        similar chunks and the one before it in its document; the tokens whose KV moves are those whose meaning depends on
        other text. The KV of that second pass is what is stored for questions.
    Parameters: 5 similar chunks and 1 before; ratio 0.1. FusionRAG's 10 took prompts of small chunks farther from full attention.
    Differs from the paper: nothing to differ from.
    Relations: `woven+prophetkv` is this recipe without context sensitivity; `following+weave` prepares after the chunk before
        alone, so that a chunk's KV depends on its own document only, and measures in a pass of its own.
    """
    return Recipe(
        "weave",
        prepare=SimilarAndPrevious(),
        select=TopScores(QuestionAttention(times=ContextSensitivity())),
        ratio=0.1,
    )


def shifted() -> Recipe:
    """`weave`, and the rest of each chunk is shifted by the mean movement of its recomputed rows.

    Paper: none; its preparation and its score are those of `weave`.
    Idea: other text before a chunk moves the keys and values of all its tokens in a common direction, beside what it does to
        each of them; recomputed rows show that direction.
    Parameters: as `weave`, with ratio 0.2. A quarter of the budget goes to evenly spaced rows, which alone show the direction: the
        rows that a question attends to move otherwise. A chunk's mean is pulled towards that of all chunks as by 10 more rows.
    Differs from the paper: nothing to differ from.
    Relations: `weave`, without the shift. kvweave-lab has the same for `prophetkv` and `cacheblend`, whose isolated chunks it does
        not help reliably.
    """
    select = TopScores(QuestionAttention(times=ContextSensitivity()), sampled=0.25)
    return replace(weave(), name="weave-shifted", select=select, recompute=ShiftedRows(), ratio=0.2)


@dataclass(frozen=True, slots=True)
class SimilarAndPrevious(WithNeighbours):
    """After the `similar` most similar chunks and then the `previous` chunks before it in its document. In no paper.

    Where not all of them fit the model's context, the previous ones stay: a chunk's first sentences often refer to them.
    `compute` measures on the way how far each token's KV moved.
    """

    similar: int = 5
    previous: int = 1

    @property
    def kind(self) -> str:
        return f"woven-{self.similar}-{self.previous}"

    @property
    def by_products(self) -> tuple[FeatureExtractor, ...]:
        """How far KV moved."""
        return (ContextSensitivity(self),)

    def provenances(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> tuple[KVProvenance, ...]:
        """Return this kind, then that of `Previous`, which earlier versions prepared for `weave`, and `isolated`."""
        own, isolated = WithNeighbours.provenances(self, adapter, prefix, chunk_tokens)
        previous, _ = Previous(self.previous).provenances(adapter, prefix, chunk_tokens)
        return own, previous, isolated

    def neighbours(self, ctx: PrepareContext, chunk: Ids) -> list[Ids]:
        """Return the previous chunks if they fit, behind as many similar ones, which are others, as fit beside them."""
        previous = ctx.corpus.previous(chunk, self.previous)
        similar = ctx.corpus.similar(chunk, self.similar + len(previous))
        others = [ids for ids in similar if ids not in previous][: self.similar]
        before = fitting(ctx, chunk, previous[::-1])[::-1]
        return [*fitting(ctx, chunk, others, before), *before]

    def features_of(
        self, ctx: PrepareContext, prepared: PreparedChunk, isolated: ChunkKV
    ) -> tuple[StoreEntry, ...]:
        """Return the feature that `ContextSensitivity` would extract in a pass of its own."""
        return (ContextSensitivity(self).measured(ctx, prepared, isolated),)


@dataclass(frozen=True, slots=True)
class ContextSensitivity(FeatureExtractor):
    """How far each token's KV moves if other chunks come before its chunk: a feature `moved` (n,) float32.

    The distance between KV computed after `neighbours` and isolated KV, as a share of the latter's length, averaged over
    layers, keys (before rotation) and values. A token that means the same after any text hardly moves. A token that
    takes its meaning from earlier text, such as a word after a pronoun, moves even after the wrong text.

    The isolated KV is the stored one: quantised, it leaves the order of the tokens nearly as it is, so one feature serves
    every storage. A chunk without neighbours, or without room for them in the model's context, gets no feature.
    """

    neighbours: WithNeighbours = field(default_factory=SimilarAndPrevious)

    def provenance(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Return the provenance after the system prefix, with the kind of the neighbours in its own."""
        return replace(
            isolated_provenance(adapter, prefix, chunk_tokens), kind=f"moved-{self.neighbours.kind}"
        )

    def extract(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Run one pass over each chunk after its neighbours' isolated KV; measure the result and drop it.

        For chunks whose preparation does not measure it on the way.
        """
        for chunk in chunks:
            neighbours = self.neighbours.neighbours(ctx, chunk)
            if neighbours:
                yield self.measured(ctx, encode_after(ctx, neighbours, chunk), isolated_kv(ctx, chunk))

    def measured(self, ctx: PrepareContext, moved: PreparedChunk, isolated: ChunkKV) -> StoreEntry:
        """Return the feature of a chunk, given its KV after `neighbours` as computed and alone as stored."""
        chunk = moved.kv.token_ids
        feature = ChunkFeature(chunk, {"moved": _relative_distance(moved.kv, isolated)})
        return StoreEntry(feature, self.provenance(ctx.adapter, ctx.prefix, len(chunk)), moved.sources)

    def of_stale_tokens(self, state: PrefillState) -> Tensor:
        """Return (n,) float32: how far each stale token moves, from the features of its chunk.

        The tokens of a chunk without a feature get the mean of the other chunks' tokens.
        """
        request = state.request
        chunks = [request.prompt.ids(found.span) for found in state.matched if found.origin == "reused"]
        features = request.features(self, chunks)
        known = [feature.tensors["moved"] for feature in features if feature is not None]
        mean = torch.cat(known).mean() if known else torch.ones(())
        moved = [
            mean.expand(len(ids)) if feature is None else feature.tensors["moved"]
            for ids, feature in zip(chunks, features, strict=True)
        ]
        return torch.cat(moved)


def _relative_distance(kv: ChunkKV, isolated: ChunkKV) -> Tensor:
    """Return (n,) float32, from KV (L, 2, G, n, D) of the same tokens."""
    alone = isolated.kv.cpu().float()  # the store may have a copy on the model's device
    off = (kv.kv.cpu().float() - alone).square().sum(dim=(2, 4))  # (L, 2, n)
    length = alone.square().sum(dim=(2, 4)).clamp(min=1e-9)
    return (off / length).sqrt().mean(dim=(0, 1))
