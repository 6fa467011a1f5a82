"""Which layers' attention predicts another's: an auxiliary model's (CacheClip), and each layer over stale KV (QCFuse)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.adapter import Adapter
from kvweave.models.hooks import AttentionProbe
from kvweave.models.prompt import SEPARATOR
from kvweave.models.support import CRITICAL_LAYERS
from kvweave.ops.scores import top_tokens
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.request import Budget
from kvweave.recipes.select import last_layer
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import Prompt, TokenizedPrompt
from kvweave_lab.eval.outcomes import REUSE
from kvweave_lab.eval.preparation import prepare_sample, render, too_long
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.measure import attention_divergence, common_share, jaccard
from kvweave_lab.eval.selection.observe import FullView, context_of, observe_full, observe_stale
from kvweave_lab.scores import context_offsets, transfer_scores

TOP_SHARE = 0.2  # CacheClip §2.8


@dataclass(frozen=True, slots=True)
class Alignment:
    """One prompt's distances to the reference model's last layer (CacheClip §2.8, fig. 2).

    The attention compared is that of the user's question to the context under full attention, averaged over heads and
    rows.

    Attributes:
        kl: KL(reference's last layer ‖ auxiliary's last layer), in nats.
        own_kl: KL(reference's last layer ‖ reference's first layer).
        jaccard: of the top 20 % tokens, auxiliary's last layer.
        own_jaccard: of the top 20 % tokens, reference's first layer.
    """

    kl: float
    own_kl: float
    jaccard: float
    own_jaccard: float


def align(adapter: Adapter, auxiliary: Adapter, sample: Sample, full: FullView) -> Alignment | None:
    """Run the auxiliary model over a sample and compare its last layer with the reference's.

    Returns None if the prompt is too long for the auxiliary model, or if the tokens of the two cannot be aligned.
    """
    prompt = auxiliary.template.render(Prompt(sample.question, sample.chunks))
    if prompt.tokens > auxiliary.geometry.context_tokens:
        return None
    source = context_offsets(auxiliary.template, sample.chunks)
    target = context_offsets(adapter.template, sample.chunks)
    if source is None or target is None:
        return None
    characters = sum(len(text) + len(SEPARATOR) for text in sample.chunks)
    last, first = full.attended.question[full.attended.layers[-1]], full.attended.question[0]
    predicted = transfer_scores(_last_layer(auxiliary, prompt), source, target, characters)
    count = Budget(TOP_SHARE).max_rows(full.context.tokens)
    wanted = top_tokens(last, count)
    return Alignment(
        kl=attention_divergence(last, predicted),
        own_kl=attention_divergence(last, first),
        jaccard=float(jaccard(top_tokens(predicted, count), wanted)),
        own_jaccard=float(jaccard(top_tokens(first, count), wanted)),
    )


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """How well each layer's attention from the question, over stale KV, predicts what decoding attends to (QCFuse).

    Attributes:
        critical_layers: the layers that find the most, ascending.
        found: for each layer, the mean share of the tokens most attended by decoding that are also most attended by its
            question rows.
        samples: number of samples.
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
    count: int = CRITICAL_LAYERS,
    progress: Progress = no_progress,
) -> LayerProfile:
    """Run a full prefill with its answer, and one pass of the question over isolated chunk KV, for each sample.

    What decoding attends to is the mean over layers under full attention. Only layers count and become critical that see the
    whole context of every sample. Samples that are too long for the model are left out. In a tie the earlier layer counts. Raises InvalidRequest without samples or for a ratio that is not
    above 0 and up to 1, and PromptTooLong if no sample fits.
    """
    if not samples or not 0 < ratio <= 1:
        raise InvalidRequest(
            f"nothing to measure: {len(samples)} samples, ratio {ratio}; give samples and a ratio above 0"
        )
    left_out = too_long(adapter, samples)
    fitting = [sample for sample in samples if sample.name not in left_out]
    found, voters = [], []
    for done, sample in enumerate(fitting, 1):
        shares, layers = _found_by_layers(adapter, sample, ratio)
        found.append(shares)
        voters.append(layers)
        progress("prompts", done, len(fitting))
    mean = torch.stack(found).mean(dim=0)
    able = sorted(set.intersection(*(set(layers) for layers in voters)))
    ranked = torch.full_like(mean, -1.0)  # below every share
    ranked[able] = mean[able]
    best = top_tokens(ranked, min(count, len(able))).nonzero()[:, 0].tolist()
    return LayerProfile(tuple(best), tuple(mean.tolist()), len(fitting), ratio)


def _last_layer(auxiliary: Adapter, prompt: TokenizedPrompt) -> Tensor:
    """Return the attention from the user's question to the context in the last layer that sees all of it, (n,)."""
    context = context_of(prompt)
    votes = last_layer(auxiliary.geometry, prompt.user_rows[1] - context.start)
    probe = AttentionProbe(
        torch.arange(*prompt.user_rows),
        columns=(context.start, context.end),
        layers=votes.layers,
        lift_windows=votes.lift_windows,
    )
    plan = auxiliary.rows(torch.arange(prompt.tokens))
    plan.hooks.append(probe)
    auxiliary.compute(auxiliary.new_cache(prompt.tokens), prompt.token_ids, plan)
    return probe.weights[0].cpu()


def _found_by_layers(adapter: Adapter, sample: Sample, ratio: float) -> tuple[Tensor, tuple[int, ...]]:
    """Return one sample's share for each layer, (L,) float64, and the layers that see its whole context."""
    prompt = render(adapter, sample)
    recipe, store = recipe_named(REUSE), MemoryStore()
    prepare_sample(adapter, store, sample, prompt, recipe)
    full = observe_full(adapter, prompt, sample.max_new_tokens)
    stale = observe_stale(recipe, adapter, store, prompt)
    tokens = Budget(ratio).max_rows(full.context.tokens)
    wanted = top_tokens(full.decoded, tokens)
    shares = common_share(top_tokens(stale.attended.question, tokens), wanted)
    return shares, stale.attended.layers
