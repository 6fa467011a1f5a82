"""Which layers' attention from the question, over stale KV, tells best what the decoded answer will attend to (QCFuse)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.critical_layers import COUNT
from kvweave.ops.scores import top_tokens
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.request import Budget
from kvweave_lab.eval.fitting import render, too_long
from kvweave_lab.eval.preparing import prepare_sample
from kvweave_lab.eval.results import REUSE
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.measures import common_share
from kvweave_lab.eval.selection.observe import observe_full, observe_stale


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What was measured.

    Attributes:
        critical_layers: the layers that found the most, ascending.
        found: for each layer the share of the tokens most attended by decoding that its question rows attend to most, on
            the mean over samples.
        samples: how many there were.
        ratio: share of the context that counts as most attended.
    """

    critical_layers: tuple[int, ...]
    found: tuple[float, ...]
    samples: int
    ratio: float


def profile_layers(
    adapter: Adapter,
    samples: Sequence[Sample],
    *,
    ratio: float = 0.2,
    count: int = COUNT,
    progress: Progress = lambda stage, done, total: None,
) -> LayerProfile:
    """One full prefill with its answer, and one pass of the question over isolated chunk KV, for each sample.

    What decoding attends to is the mean over all layers under full attention. Samples that the model has no room for
    are left out; in a tie the earlier layer counts. Raises InvalidRequest without samples or for a ratio that is not
    above 0 and up to 1, and PromptTooLong if no sample fits.
    """
    if not samples or not 0 < ratio <= 1:
        raise InvalidRequest(
            f"nothing to measure: {len(samples)} samples, ratio {ratio}; give samples and a ratio above 0"
        )
    left_out = too_long(adapter, samples)
    fitting = [sample for sample in samples if sample.name not in left_out]
    found = []
    for done, sample in enumerate(fitting, 1):
        found.append(_found(adapter, sample, ratio))
        progress("prompts", done, len(fitting))
    mean = torch.stack(found).mean(dim=0)
    best = top_tokens(mean, count).nonzero()[:, 0].tolist()
    return LayerProfile(tuple(best), tuple(mean.tolist()), len(fitting), ratio)


def _found(adapter: Adapter, sample: Sample, ratio: float) -> torch.Tensor:
    """(L,) float64: one sample's share for each layer."""
    prompt = render(adapter, sample)
    recipe, store = recipe_named(REUSE), MemoryStore()
    prepare_sample(adapter, store, sample, prompt, recipe)
    full = observe_full(adapter, prompt, sample.max_new_tokens)
    stale = observe_stale(recipe, adapter, store, prompt)
    tokens = Budget(ratio).rows(full.context.tokens)
    wanted = top_tokens(full.decoding.mean(dim=0), tokens)
    return common_share(top_tokens(stale.attended.question, tokens), wanted)
