"""Where the model that answers looks, as something another model can be taught: prompts, read under full attention.

Knows nothing of how it is taught.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.models.adapter import Adapter
from kvweave.models.hooks import AttentionProbe
from kvweave.models.prompt import SEPARATOR
from kvweave.ops.scores import Offsets, carry
from kvweave.types import Prompt


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and how much the primary's question attends to its chunks' tokens in the last layer.

    `attended` has (n,) for each chunk, under full attention: weights of the rows that the user wrote, averaged over
    rows and heads, the softmax over the context alone. `offsets` are the characters of those tokens.
    """

    question: str
    chunks: tuple[str, ...]
    attended: tuple[Tensor, ...]
    offsets: tuple[Offsets, ...]

    def carried(self, scores: Sequence[Tensor], offsets: Sequence[Offsets]) -> Tensor:
        """Scores of another tokenizer's tokens of every chunk as scores of the primary's, (N,)."""
        return _carried(self.chunks, scores, offsets, self.offsets)

    def wanted(self, offsets: Sequence[Offsets]) -> Tensor:
        """The primary's attention as a distribution over another tokenizer's tokens of all chunks, (N′,) float32."""
        shares = _carried(self.chunks, self.attended, self.offsets, offsets)
        return (shares / shares.sum().clamp_min(1e-12)).float()


def observe(primary: Adapter, prompt: Prompt) -> Example | None:
    """One full prefill of the primary; None where it has no room for the prompt, or the prompt no chunks."""
    rendered = primary.template.render(prompt)
    spans = [span for span in rendered.spans if span.kind == "chunk"]
    if not spans or rendered.tokens > primary.geometry.context_tokens:
        return None
    first, end = spans[0].start, spans[-1].end
    start, stop = rendered.user_rows
    question = rendered.spans[-1]
    asked = torch.arange(start, stop) if stop > start else torch.arange(question.start, question.end)
    probe = AttentionProbe(asked, columns=(first, end), layers={primary.geometry.layers - 1})
    plan = primary.rows(torch.arange(rendered.tokens))
    plan.hooks.append(probe)
    primary.compute(primary.new_cache(rendered.tokens), rendered.token_ids, plan)
    weights = probe.weights[0].cpu()
    return Example(
        prompt.question,
        prompt.chunks,
        tuple(weights[span.start - first : span.end - first] for span in spans),
        tuple(primary.template.align(rendered.ids(span), prompt.chunks[span.chunk]) for span in spans),
    )


def _carried(
    chunks: Sequence[str], scores: Sequence[Tensor], source: Sequence[Offsets], target: Sequence[Offsets]
) -> Tensor:
    parts = [
        carry(one, have, want, len(text) + len(SEPARATOR))
        for text, one, have, want in zip(chunks, scores, source, target, strict=True)
    ]
    return torch.cat(parts)
