"""How much each token of a chunk attended to its own chunk, to each chunk before it and to the system prefix.

Cache-Craft's intra and inter attention, recorded in the very pass that the chunk's KV comes from and stored beside
it. Knows nothing of what is concluded from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvweave.core import ChunkNote, Making, TokenizedPrompt
from kvweave.models.attention_shares import AttentionShares
from kvweave.recipes.assembled import rows_of

_SHARES = "shares"


def attention_making(kv: Making) -> Making:
    """What names the note on the attention of a chunk whose KV was made so."""
    return replace(kv, kind="attention")


class ChunkAttention:
    """Watches a pass that computes whole chunks of a prompt, behind exact rows, and writes a note about each.

    Args:
        prompt: what the pass computes.
        chunks: the numbers of the chunks' spans; the pass computes all their rows.
    """

    def __init__(self, prompt: TokenizedPrompt, chunks: Sequence[int]) -> None:
        self._prompt, self._chunks = prompt, chunks
        spans = [prompt.spans[number] for number in chunks]
        self._rows = rows_of(spans)
        self.watch = AttentionShares(self._rows, [(span.start, span.end) for span in prompt.spans])

    def note(self, number: int) -> ChunkNote:
        """What one of the chunks attended to; call it after the pass."""
        span = self._prompt.spans[number]
        inside = (self._rows >= span.start) & (self._rows < span.end)
        earlier = [n for n in range(1, number) if self._prompt.spans[n].tokens]
        shares = self.watch.shares.cpu()[inside][:, [0, *earlier, number]]  # (n, P + 2)
        return ChunkNote(self._prompt.ids(span), {_SHARES: shares.T.contiguous()})


@dataclass(frozen=True, slots=True)
class NotedAttention:
    """What a version's note says, averaged over layers and heads; its n tokens' shares add up to 1.

    `prefix` (n,) goes to the system prefix, `inter` (P, n) to each of the P chunks before it, `intra` (n,) to its own.
    """

    prefix: Tensor
    inter: Tensor
    intra: Tensor


def noted_attention(note: ChunkNote | None, earlier: int) -> NotedAttention | None:
    """Read a note about a chunk that stood behind so many others; None if there is none, or it is about another path."""
    if note is None or note.tensors[_SHARES].shape[0] != earlier + 2:
        return None
    shares = note.tensors[_SHARES]
    return NotedAttention(shares[0], shares[1:-1], shares[-1])
