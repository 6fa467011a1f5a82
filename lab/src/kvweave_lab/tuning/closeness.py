"""How near an auxiliary model looks to where the model that answers looks, measured as recipes use it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.models.adapter import Adapter
from kvweave.ops.scores import top_tokens
from kvweave.recipes.auxiliary import Auxiliary
from kvweave.recipes.request import Budget
from kvweave_lab.eval.selection.auxiliary import TOP_SHARE
from kvweave_lab.eval.selection.measures import attention_divergence, jaccard
from kvweave_lab.tuning.examples import Example


@dataclass(frozen=True, slots=True)
class Closeness:
    """Means over prompts (CacheClip §2.8).

    `kl` is KL(primary ‖ auxiliary) in nats, both over the primary's context tokens; `jaccard` of their top 20 %.
    """

    kl: float
    jaccard: float


def closeness(adapter: Adapter, examples: Sequence[Example]) -> Closeness:
    """Every chunk read alone and the question asked of each, as at indexing time and in a request."""
    auxiliary = Auxiliary(adapter)
    found = [_one(auxiliary, example) for example in examples]
    count = len(found)
    return Closeness(sum(one.kl for one in found) / count, sum(one.jaccard for one in found) / count)


def _one(auxiliary: Auxiliary, example: Example) -> Closeness:
    kv, offsets = zip(*(auxiliary.read(text) for text in example.chunks), strict=True)
    foreseen = example.carried(auxiliary.attention(kv, example.question), offsets)
    attended = torch.cat(example.attended)
    count = Budget(TOP_SHARE).rows(attended.numel())
    same = jaccard(top_tokens(foreseen, count), top_tokens(attended, count))
    return Closeness(attention_divergence(attended, foreseen), float(same))
