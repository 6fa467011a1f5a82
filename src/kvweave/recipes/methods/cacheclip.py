"""CacheClip: a small auxiliary model selects tokens, and windows keep neighbouring ones together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.ops.scores import transfer_lowest, windowed_ranks
from kvweave.recipes.auxiliary import AuxiliaryExtractor, AuxiliaryFeature, load_auxiliary
from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.recipe import Recipe


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

    A window of `window` tokens keeps its selected tokens if they are more than `more_than`. Kept tokens are mapped to the
    model's tokens by characters and only then cut to the budget: windows that a smaller selection would not have kept
    go first. With `refill` the selection grows until the kept tokens fill the budget; tokens in windows that
    are too short ever to be kept come last. Without, the budget's share of the auxiliary's tokens is selected.

    Attributes:
        auxiliary: folder or hub id of the model; None is the one shipped with kvweave.
        window: tokens of the auxiliary model in a window.
        more_than: a window with this many selected tokens or fewer keeps none; below `window`.
        refill: use the budget up.
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

    def _features(self, state: PrefillState) -> list[AuxiliaryFeature]:
        """Return the feature of every stale chunk, in prompt order; compute those that are not stored."""
        request, extractor = state.request, AuxiliaryExtractor(self.auxiliary)
        chunks = [request.prompt.ids(m.span) for m in state.matched if m.origin == "reused"]
        stored = request.features(extractor, chunks)
        return [
            AuxiliaryFeature.of(feature or extractor.feature(request.adapter, ids))
            for ids, feature in zip(chunks, stored, strict=True)
        ]

    def _ranks(self, features: Sequence[AuxiliaryFeature], scores: Tensor) -> Tensor:
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
