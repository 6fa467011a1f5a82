"""Lower bounds that every method has to beat: positions left wrong or moved alone, and tokens drawn at random."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvweave.recipes.features import FeatureExtractor
from kvweave.recipes.match import MatchSystemThenChunk
from kvweave.recipes.place import Placement, TruePositions
from kvweave.recipes.prefill_state import PrefillState
from kvweave.recipes.prepare import Bare
from kvweave.recipes.recipe import Recipe
from kvweave.recipes.request import Matched, PrefillRequest
from kvweave.recipes.select import TopScores


def naive() -> Recipe:
    """Chunks prefilled alone and put side by side without moving their positions.

    Paper: CacheClip (arXiv 2510.10129) §2.3 describes its two faults, wrong positions and repeated attention sinks.
    Idea: none; it shows what happens when nothing is repaired.
    Parameters: none.
    Differs from the paper: the shared system prefix is exact, as in every recipe. Chunks prepared after it
        (`--prepare isolated` and others) stay right after it instead of at the front.
    Relations: `direct` repairs the positions, `reuse` the sinks as well.
    """
    return Recipe("naive", prepare=Bare(), match=MatchSystemThenChunk(), place=StoredPositions())


def direct() -> Recipe:
    """Chunks prefilled alone, moved to their positions in the prompt.

    Paper: CacheClip (arXiv 2510.10129) §4.1 ("direct reuse"); ProphetKV's (arXiv 2602.02579) NaiveReuse.
    Idea: rotary positions are relative, so stored keys can be rotated to any position.
    Parameters: none.
    Differs from the paper: keys are stored before rotation, so moving them is exact to the bit.
    Relations: `reuse` prefills after the system prefix and so has no sink at every chunk's start.
    """
    return Recipe("direct", prepare=Bare(), match=MatchSystemThenChunk())


def random() -> Recipe:
    """Recompute tokens drawn at random.

    Paper: none; the baseline that a selector has to beat.
    Idea: recomputing any tokens helps a little, since recomputed rows see the whole prompt.
    Parameters: ratio 0.15.
    Differs from the paper: nothing to differ from.
    Relations: every selective recipe at the same ratio.
    """
    return Recipe("random", select=TopScores(RandomScore()), ratio=0.15)


@dataclass(frozen=True, slots=True)
class StoredPositions:
    """Each chunk at the position where it was prepared, which is wrong in most prompts: a lower bound.

    That is position 0 for a chunk that was prefilled alone. All others start right after the system prefix, because
    entries do not record the length of the neighbours that a chunk was prepared after.
    """

    def place(self, request: PrefillRequest, matched: tuple[Matched, ...]) -> Placement:
        """Leave each reused span unmoved; exact spans are at their true positions already."""
        true = TruePositions().place(request, matched)
        stored = [
            span
            if m.origin == "exact"
            else replace(span, rope_start=len(request.prefix) if m.provenance and m.provenance.context else 0)
            for m, span in zip((m for m in matched if m.kv is not None), true.spans, strict=True)
        ]
        return replace(true, spans=tuple(stored))


@dataclass(frozen=True, slots=True)
class RandomScore:
    """Uniform scores, seeded by the prompt's tokens, so that the same prompt always selects the same rows."""

    supports_coverage: ClassVar[bool] = False
    extractors: ClassVar[tuple[FeatureExtractor, ...]] = ()

    def scores(self, state: PrefillState) -> Tensor:
        """Draw them; runs no pass."""
        seed = hash(state.request.prompt.token_ids) & 0x7FFFFFFF  # of integers: the same in every process
        return torch.rand(state.stale.numel(), generator=torch.Generator().manual_seed(seed))
