"""The selections that are compared: every way of ranking a context's tokens, as scores, higher first."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from kvweave_lab.eval.selection.differences import Differences
from kvweave_lab.eval.selection.observe import FullView, StaleView

SELECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "question_stale": "attended by the question over stale KV, mean over layers (ProphetKV eq. 7)",
        "question_stale_first": "the same, first layer alone (ProphetKV fig. 7)",
        "question_stale_last": "the same, last layer alone (FusionRAG §3.2, over stale KV)",
        "question_stale_mass": "question over stale KV, softmax over all it sees, mean over layers",
        "rows_stale": "attended by all rows behind the context over stale KV, mean over layers",
        "question_full": "attended by the question under full attention, mean over layers",
        "rows_full": "attended by all rows behind the context under full attention, mean over layers",
        "decoding": "attended by the decoded answer under full attention, mean over layers",
        "optimal": "largest residual of ProphetKV eq. 5, mean over layers (App. F)",
        "deviation": "values of the second layer that are furthest off (CacheBlend)",
        "kvshare": "the same, weighted by what the first layer's rows attend to (KVShare)",
        "position": "the first tokens of every chunk (EPIC)",
        "random": "any tokens",
    }
)
"""Every selection by name, in the order of all tables, with what it ranks by."""

FACTORS: Mapping[str, str] = MappingProxyType(
    {
        "ideal": "‖ΦV − Φ′V′‖, eq. 5 itself",
        "attention_change": "|ΔΦ|",
        "stale_attention": "Φ′, which needs no full pass",
        "value_change": "‖ΔV‖",
        "stale_value": "‖V′‖",
    }
)
"""The factors of ProphetKV eq. 6 and what they are, each ranking the tokens of every layer on its own."""


def selection_scores(full: FullView, stale: StaleView, off: Differences, seed: int) -> Mapping[str, Tensor]:
    """Scores (n,) of every selection, the same for all layers, in the order of SELECTIONS."""
    second = min(1, len(off.values) - 1)
    before, after = stale.attended, full.attended
    scores = {
        "question_stale": before.question.mean(0),
        "question_stale_first": before.question[0],
        "question_stale_last": before.question[-1],
        "question_stale_mass": before.mass.mean(0),
        "rows_stale": before.rows.mean(0),
        "question_full": after.question.mean(0),
        "rows_full": after.rows.mean(0),
        "decoding": full.decoding.mean(0),
        "optimal": off.residual.mean(0),
        "deviation": off.values[second],
        "kvshare": full.inflow * off.shift[second],
        "position": -full.context.offset.float(),
        "random": torch.rand(full.context.tokens, generator=torch.Generator().manual_seed(seed)),
    }
    return {name: scores[name] for name in SELECTIONS}


def factor_scores(full: FullView, stale: StaleView, off: Differences) -> Tensor:
    """Scores of every factor of ProphetKV eq. 6: (factors, L, n), in the order of FACTORS."""
    before, after = stale.attended.mass, full.attended.mass
    scores = {
        "ideal": off.residual,
        "attention_change": (after - before).abs(),
        "stale_attention": before,
        "value_change": off.values,
        "stale_value": off.stale_values,
    }
    return torch.stack([scores[name] for name in FACTORS])
