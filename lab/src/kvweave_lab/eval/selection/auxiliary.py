"""An auxiliary model against the reference model's own first layer: which foresees its last layer better?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter
from kvweave.models.hooks import AttentionProbe
from kvweave.models.prompt import SEPARATOR
from kvweave.ops.scores import carry, top_tokens
from kvweave.recipes.request import Budget
from kvweave.types import Prompt, TokenizedPrompt
from kvweave_lab.eval.samples import Sample
from kvweave_lab.eval.selection.context import context_of
from kvweave_lab.eval.selection.measures import attention_divergence, jaccard
from kvweave_lab.eval.selection.observe import FullView

TOP_SHARE = 0.2  # CacheClip §2.8


@dataclass(frozen=True, slots=True)
class Alignment:
    """One prompt's distances to the reference model's last layer (CacheClip §2.8, fig. 2).

    Attention of the user's question to the context under full attention, averaged over heads and rows.

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
    """Run the auxiliary model over a sample and compare.

    None if the auxiliary model has no room for the prompt, or if tokens cannot be laid side by side.
    """
    prompt = auxiliary.template.render(Prompt(sample.question, sample.chunks))
    if prompt.tokens > auxiliary.geometry.context_tokens:
        return None
    source = auxiliary.template.context_offsets(sample.chunks)
    target = adapter.template.context_offsets(sample.chunks)
    if source is None or target is None:
        return None
    characters = sum(len(text) + len(SEPARATOR) for text in sample.chunks)
    last, first = full.attended.question[-1], full.attended.question[0]
    foreseen = carry(_last_layer(auxiliary, prompt), source, target, characters)
    count = Budget(TOP_SHARE).rows(full.context.tokens)
    wanted = top_tokens(last, count)
    return Alignment(
        kl=attention_divergence(last, foreseen),
        own_kl=attention_divergence(last, first),
        jaccard=float(jaccard(top_tokens(foreseen, count), wanted)),
        own_jaccard=float(jaccard(top_tokens(first, count), wanted)),
    )


def _last_layer(auxiliary: Adapter, prompt: TokenizedPrompt) -> Tensor:
    """The last layer's attention from the user's question to the context, (n,)."""
    context = context_of(prompt)
    probe = AttentionProbe(
        torch.arange(*prompt.user_rows),
        columns=(context.start, context.end),
        layers={auxiliary.geometry.layers - 1},
    )
    plan = auxiliary.rows(torch.arange(prompt.tokens))
    plan.hooks.append(probe)
    auxiliary.compute(auxiliary.new_cache(prompt.tokens), prompt.token_ids, plan)
    return probe.weights[0].cpu()
