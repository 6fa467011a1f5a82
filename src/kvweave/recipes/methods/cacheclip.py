"""CacheClip: a small auxiliary model selects tokens, and windows keep neighbouring ones together.

The auxiliary model encodes the chunks beside the model that answers, to see where a question looks. Its KV of a chunk is
computed at indexing time and stored as a feature of the chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvweave.kvstore.keys import digest_tokens
from kvweave.models.adapter import Adapter
from kvweave.models.engine import Engine
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.hooks import AttentionProbe
from kvweave.models.loading import AUXILIARY_NAME, load_model
from kvweave.ops.scores import Offsets, transfer_lowest, windowed_ranks
from kvweave.recipes.context import Ids, PrepareContext, StoreEntry
from kvweave.recipes.features import FeatureExtractor, feature_bytes
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import kv_bytes
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.select import last_layer
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, Prompt


def cacheclip(auxiliary: str | None = None) -> Recipe:
    """Recompute the tokens that a small auxiliary model attends to, in groups of neighbours, until the budget is spent.

    Paper: CacheClip (arXiv 2510.10129) §3 (shared prefix §3.1, selection and windows §3.3, mapping §3.4, auxiliary model on the CPU §3.6).
    Idea: the last layers of a small and a large model attend to the same words. The small model encodes chunk by chunk
        with its own KV, so that selection costs the large model nothing.
    Parameters: ratio 0.2; windows of 8 tokens that keep more than 5 (both as in the paper); the auxiliary model.
    Differs from the paper: §3.3 does not say what becomes of the budget of dropped tokens. A tenth of the tokens, spread
        as attention is, rarely puts six tokens into a window of eight. A selection fixed before windows are dropped would
        recompute almost nothing (`cacheclip-windows` in the lab). So more tokens are
        selected until those that windows keep fill the budget. The auxiliary model runs while chunk KV is loading; only the
        first bytes of KV from a shared tier are awaited before the recomputation.
    Relations: `prophetkv` runs the question through the model itself, over all stale chunks at once; `kvweave
        train-selector` fits the auxiliary model to the model that answers (§3.5).
    """
    return Recipe("cacheclip", select=AuxiliaryWindows(auxiliary), ratio=0.2)


@dataclass(frozen=True, slots=True)
class AuxiliaryWindows:
    """Tokens that the question attends to in the auxiliary model's last layer, if enough of their neighbours are too.

    The tokens of all stale chunks are ranked together by the attention of one pass per chunk, with a softmax over
    prefix, chunk and question. Prefix and question are the same in every pass. So the attention that a chunk takes from them
    says how much the question finds there, and shares from different passes compare.

    A window of `window` of the auxiliary's tokens keeps its selected tokens if they are more than `more_than`, below `window`.
    Kept tokens are mapped to the model's tokens by characters and only then cut to the budget: windows that a smaller selection
    would not have kept go first. With `refill` the selection grows until the kept tokens fill the budget; tokens in windows that
    are too short ever to be kept come last. Without, the budget's share of the auxiliary's tokens is selected.
    """

    auxiliary: str | None = None
    window: int = 8
    more_than: int = 5
    refill: bool = True
    selective: ClassVar[bool] = True
    supports_coverage: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The auxiliary model's KV of every chunk."""
        return (AuxiliaryExtractor(self.auxiliary),)

    def choose(self, state: PrefillState) -> Tensor:
        """Run one packed call of the auxiliary model; return fewer rows than the budget only without `refill`.

        Tokens of a chunk after the end of the auxiliary model's context come last, without `refill` never.
        """
        budget, stale = state.request.budget, state.stale
        if budget.recomputes_none or not stale.numel():
            return stale[:0]
        features = self._features(state)
        template, prompt = state.request.adapter.template, state.request.prompt
        question = template.decode(prompt.token_ids[slice(*prompt.user_rows)])
        auxiliary = load_auxiliary(self.auxiliary)
        scores = torch.cat(auxiliary.attention([feature.kv for feature in features], question))
        count = budget.row_count(scores)
        ranks = self._ranks(features, scores)
        most = min(budget.max_rows(stale.numel()), -(-count * stale.numel() // max(1, scores.numel())))
        chosen = ranks.argsort(stable=True)[:most]
        if not self.refill:
            chosen = chosen[ranks[chosen] <= count]
        return stale[chosen.sort().values]

    def _features(self, state: PrefillState) -> "list[AuxiliaryFeature]":
        """Return the feature of every stale chunk, in prompt order; compute those that are not stored."""
        request, extractor = state.request, AuxiliaryExtractor(self.auxiliary)
        chunks = [request.prompt.ids(m.span) for m in state.matched if m.origin == "reused"]
        stored = request.features(extractor, chunks)
        return [
            AuxiliaryFeature.of(feature or extractor.feature(request.adapter, ids))
            for ids, feature in zip(chunks, stored, strict=True)
        ]

    def _ranks(self, features: "Sequence[AuxiliaryFeature]", scores: Tensor) -> Tensor:
        """Return how many of the auxiliary's tokens must be selected before each stale token is kept, (stale,)."""
        lengths = [feature.kv.tokens for feature in features]
        ranks = windowed_ranks(scores, lengths, window=self.window, more_than=self.more_than)
        never = 2 * scores.numel() + 1  # no rank is larger
        mapped = [
            transfer_lowest(
                part, feature.auxiliary_offsets, feature.offsets, feature.characters, otherwise=never
            )
            for part, feature in zip(torch.split(ranks, lengths), features, strict=True)
        ]
        return torch.cat(mapped)


# The auxiliary model


class AuxiliaryModel:
    """An auxiliary model with the KV of its system prefix, after which it encodes every chunk (CacheClip §3.1).

    The prefix is always the template's default instruction: the model was trained with it, and one KV of a chunk then
    serves prompts with any instruction.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.prefix = adapter.encode(adapter.template.prefix_ids(None))

    def tokenize(self, text: str) -> tuple[Ids, Offsets]:
        """Return a chunk's ids and their characters in text and separator, cut to the model's context."""
        ids = self.adapter.template.chunk_ids(text)
        room = self.adapter.geometry.context_tokens - self.prefix.tokens
        return ids[:room], self.adapter.template.token_offsets(ids, text)[:room]

    def encode(self, text: str) -> tuple[ChunkKV, Offsets]:
        """Return the KV of a chunk's tokens after the prefix, and their characters."""
        ids, offsets = self.tokenize(text)
        return self.adapter.encode(ids, self.prefix), offsets

    def attention(self, chunks: Sequence[ChunkKV], question: str) -> list[Tensor]:
        """Return how much a question attends in the last layer to the tokens of each chunk, (S,) each, float32.

        Each chunk has a pass prefix ++ chunk ++ question, of which only the question is computed. All passes are one
        call of the model. Weights of the question's own words, without the template's, are averaged over rows and heads.
        Their softmax runs over everything that a row sees in its pass. The last layer is the last one that sees the whole of
        the longest chunk (`LayerVotes`).
        """
        ids, words = self.question_tokens(question)
        longest = max((chunk.tokens for chunk in chunks), default=0)
        votes = last_layer(self.adapter.geometry, longest + words.indices(len(ids))[1])
        probes, passes = [], []
        for chunk in chunks:
            before = (*self.prefix.token_ids, *chunk.token_ids)
            rows = torch.arange(len(before), len(before) + len(ids))
            probe = AttentionProbe(rows[words], layers=votes.layers, lift_windows=votes.lift_windows)
            plan = self.adapter.rows(rows)
            plan.hooks.append(probe)
            spans = [PlacedSpan(self.prefix, 0, 0), PlacedSpan(chunk, self.prefix.tokens, self.prefix.tokens)]
            passes.append((self.adapter.new_cache(len(before) + len(ids), spans), (*before, *ids), plan))
            probes.append(probe)
        self.adapter.compute_packed(passes)
        inside = [slice(self.prefix.tokens, self.prefix.tokens + chunk.tokens) for chunk in chunks]
        return [probe.weights[0, own].cpu() for probe, own in zip(probes, inside, strict=True)]

    def question_tokens(self, question: str) -> tuple[tuple[int, ...], slice]:
        """Return the ids of the question span and where in it the user's words are; everything if there are no words."""
        prompt = self.adapter.template.render(Prompt(question))
        span, (start, end) = prompt.spans[-1], prompt.user_rows
        return prompt.ids(span), slice(start - span.start, end - span.start) if end > start else slice(None)


@cache
def load_auxiliary(name: str | None) -> AuxiliaryModel:
    """Load the model of this name, as `load_model` takes it; None is the model shipped with kvweave.

    Each process loads it once, at its first use, and always on the CPU (CacheClip §3.6). Changes to its folder are seen by
    the next process.
    """
    return AuxiliaryModel(load_model(name or AUXILIARY_NAME, device="cpu"))


@dataclass(frozen=True, slots=True)
class AuxiliaryFeature:
    """A chunk as both models tokenize it: the auxiliary's KV (S′ tokens), and the characters of both models' tokens.

    Characters are counted in the chunk's text and the separator after it, `characters` in all.
    """

    kv: ChunkKV
    auxiliary_offsets: Offsets
    offsets: Offsets
    characters: int

    @classmethod
    def of(cls, feature: ChunkFeature) -> Self:
        """Read a stored feature."""
        kv = ChunkKV(tuple(feature.tensors["auxiliary_ids"].tolist()), feature.tensors["auxiliary_kv"])
        seen, offsets = feature.tensors["auxiliary_offsets"].tolist(), feature.tensors["offsets"].tolist()
        return cls(kv, seen, offsets, max([1, *(end for _, end in (*seen, *offsets))]))


@dataclass(frozen=True, slots=True)
class AuxiliaryExtractor(FeatureExtractor):
    """The KV of every chunk in the auxiliary model of this name; None is the shipped one.

    A feature with `auxiliary_kv` (L, 2, G, S′, D), `auxiliary_ids` (S′,), `auxiliary_offsets` (S′, 2) and `offsets` (S, 2).
    """

    name: str | None = None

    def provenance(self, adapter: Engine, prefix: Ids, chunk_tokens: int) -> KVProvenance:
        """Return a provenance with the auxiliary model's digest, so that other weights find nothing."""
        auxiliary = load_auxiliary(self.name)
        kind = f"auxiliary-{auxiliary.adapter.fingerprint.digest}"
        return KVProvenance(kind, (digest_tokens(auxiliary.prefix.token_ids),), exact=False)

    def extract(self, ctx: PrepareContext, chunks: Sequence[Ids]) -> Iterator[StoreEntry]:
        """Run one pass of the auxiliary model per chunk."""
        for chunk in chunks:
            provenance = self.provenance(ctx.adapter, ctx.prefix, len(chunk))
            yield StoreEntry(self.feature(ctx.adapter, chunk), provenance, (digest_tokens(chunk),))

    def bytes(self, adapter: Engine, chunk_tokens: int) -> int:
        """Count the auxiliary's KV, as if it had as many tokens, and six numbers per token for ids and characters."""
        return kv_bytes(load_auxiliary(self.name).adapter, chunk_tokens) + feature_bytes(chunk_tokens, 6)

    def feature(self, adapter: Engine, chunk: Ids) -> ChunkFeature:
        """Return the feature of one chunk; `adapter` is the model that answers."""
        auxiliary = load_auxiliary(self.name)
        text = adapter.template.chunk_text(chunk)
        offsets = adapter.template.token_offsets(chunk, text)
        kv, auxiliary_offsets = auxiliary.encode(text)
        return ChunkFeature(
            tuple(chunk),
            {
                "auxiliary_kv": kv.kv,
                "auxiliary_ids": torch.tensor(kv.token_ids, dtype=torch.int64),
                "auxiliary_offsets": torch.tensor(auxiliary_offsets, dtype=torch.int32),
                "offsets": torch.tensor(offsets, dtype=torch.int32),
            },
        )
