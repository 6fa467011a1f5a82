"""CacheClip: a small auxiliary model says which tokens matter, and windows keep them together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.ops.scores import kept_from, lowest
from kvweave.recipes.auxiliary import AuxiliaryExtractor, Reading, auxiliary_named
from kvweave.recipes.features import FeatureExtractor, features_of
from kvweave.recipes.match import MatchPathThenChunk
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.state import PrefillState


@dataclass(frozen=True, slots=True)
class AuxiliaryWindows:
    """Tokens that the question attends to in the auxiliary model's last layer, as far as their neighbours are, too.

    Scores of all stale chunks' tokens are ranked together: each is attention out of a pass over that chunk alone, its
    softmax over prefix, chunk and question. Prefix and question are the same in every pass, so what a chunk's tokens
    take from them tells how much the question finds there, and shares of different passes compare.

    The budget's share of the auxiliary's tokens is selected; a window of `window` tokens keeps what is selected of it
    if that is more than `more_than`. What is kept is mapped to the model's tokens by characters, and trimmed to the
    budget only then: windows that a smaller selection would not have kept go first. With `refill`, the selection
    grows until what is kept fills the budget; at last, tokens whose windows are too short ever to be kept join in.

    Attributes:
        auxiliary: folder or hub id of the model; None is the one that ships with kvweave.
        window: tokens of the auxiliary model in a window.
        more_than: so many selected tokens in a window are too few; below `window`.
        refill: use the budget up.
    """

    auxiliary: str | None = None
    window: int = 8
    more_than: int = 5
    refill: bool = False
    selects: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True

    @property
    def extractors(self) -> tuple[FeatureExtractor, ...]:
        """The auxiliary model's KV of every chunk."""
        return (AuxiliaryExtractor(self.auxiliary),)

    def choose(self, state: PrefillState) -> Tensor:
        """One packed call of the auxiliary model; fewer rows than the budget allows where windows drop some."""
        budget, stale = state.request.budget, state.stale
        if budget.nothing or not stale.numel():
            return stale[:0]
        readings = self._readings(state)
        template, prompt = state.request.adapter.template, state.request.prompt
        question = template.text(prompt.token_ids[slice(*prompt.user_rows)])
        scores = auxiliary_named(self.auxiliary).attention([reading.kv for reading in readings], question)
        together = torch.cat(scores)
        count = budget.spend(together)
        needed = self._needed(readings, together)
        most = min(budget.rows(stale.numel()), -(-count * stale.numel() // max(1, together.numel())))
        chosen = needed.argsort(stable=True)[:most]
        if not self.refill:
            chosen = chosen[needed[chosen] <= count]
        return stale[chosen.sort().values]

    def _readings(self, state: PrefillState) -> list[Reading]:
        """The auxiliary's reading of every stale chunk, in prompt order; one that is not stored is made for this request."""
        request, extractor = state.request, AuxiliaryExtractor(self.auxiliary)
        chunks = [request.prompt.ids(m.span) for m in state.matched if m.origin == "reused"]
        found = features_of(extractor, request, chunks)
        features = [
            feature or extractor.feature(request.adapter, ids)
            for ids, feature in zip(chunks, found, strict=True)
        ]
        return [Reading.of(feature) for feature in features]

    def _needed(self, readings: Sequence[Reading], scores: Tensor) -> Tensor:
        """How many of the auxiliary's tokens have to be selected before each stale token is, (stale,)."""
        lengths = [reading.kv.tokens for reading in readings]
        needed = kept_from(scores, lengths, window=self.window, more_than=self.more_than)
        never = 2 * scores.numel() + 1  # nothing in `needed` is larger
        mapped = [
            lowest(part, reading.auxiliary_offsets, reading.offsets, reading.characters, otherwise=never)
            for part, reading in zip(torch.split(needed, lengths), readings, strict=True)
        ]
        return torch.cat(mapped)


def cacheclip(auxiliary: str | None = None) -> Recipe:
    """Recompute the tokens that a small auxiliary model attends to, in groups of neighbours.

    Paper: CacheClip §3 (shared prefix §3.1, selection and windows §3.3, mapping §3.4, auxiliary model on the CPU §3.6).
    Idea: the last layers of a small and a large model look at the same words; the small one reads chunk by chunk over
        KV of its own, so that selection costs the large one nothing.
    Parameters: ratio 0.2; windows of 8 tokens that keep more than 5 (both the paper's); the auxiliary model.
    Differs from the paper: the selection is trimmed to the budget after mapping; the auxiliary runs beside the loading,
        which nothing waits for before the recomputation but the first bytes of what comes from a shared tier.
    Relations: `prophetkv` asks the model itself over all stale chunks at once; `cacheclip-refill` spends what windows
        leave of the budget; `kvweave train-selector` fits the auxiliary to the model that answers (§3.5).
    Measured: see the methods page.
    """
    return _recipe("cacheclip", AuxiliaryWindows(auxiliary))


def refill(auxiliary: str | None = None) -> Recipe:
    """CacheClip that uses its budget up: where windows drop tokens, more are selected until enough are kept.

    Paper: CacheClip §3.3 leaves open what becomes of the budget of dropped tokens.
    Idea: other recipes spend all they may; at the same number of recomputed rows the two can be compared.
    Parameters: as `cacheclip`.
    Differs from the paper: the budget is used up.
    Relations: `cacheclip` recomputes fewer rows at the same ratio, the fewer the smaller the ratio is.
    Measured: see the methods page.
    """
    return _recipe("cacheclip-refill", AuxiliaryWindows(auxiliary, refill=True))


def _recipe(name: str, select: AuxiliaryWindows) -> Recipe:
    return Recipe(name, match=MatchPathThenChunk(), select=select, ratio=0.2)
