"""Where each context token of a prompt lies: in which chunk, and where in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.errors import InvalidRequest
from kvweave.types import TokenizedPrompt


@dataclass(frozen=True, slots=True)
class Context:
    """The n tokens of a prompt's chunks; separators belong to the chunk before them.

    Attributes:
        start: prompt position of the first; chunks follow each other without gaps.
        end: prompt position after the last.
        chunk: (n,) number of each token's chunk.
        offset: (n,) tokens before it in its chunk.
        lengths: (chunks,) tokens of each chunk.
    """

    start: int
    end: int
    chunk: Tensor
    offset: Tensor
    lengths: Tensor

    @property
    def tokens(self) -> int:
        """The number of tokens, n."""
        return self.end - self.start

    @property
    def depth(self) -> Tensor:
        """(n,) where in its chunk each token lies, above 0 and below 1."""
        return (self.offset + 0.5) / self.lengths[self.chunk]


def context_of(prompt: TokenizedPrompt) -> Context:
    """The context of a prompt; raises InvalidRequest if it has none."""
    spans = [span for span in prompt.spans if span.kind == "chunk"]
    if not any(span.tokens for span in spans):
        raise InvalidRequest("a sample without chunks has no context to select from; leave it out")
    lengths = torch.tensor([span.tokens for span in spans])
    return Context(
        start=spans[0].start,
        end=spans[-1].end,
        chunk=torch.arange(len(spans)).repeat_interleave(lengths),
        offset=torch.cat([torch.arange(span.tokens) for span in spans]),
        lengths=lengths,
    )
