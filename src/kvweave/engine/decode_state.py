"""Where the KV of a text lies while it is being generated: on its canvas, or on flash.

Knows nothing of how tokens are chosen.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvweave.decode.handoff import computed, enter, entered
from kvweave.decode.offloaded_cache import RetrievedKV
from kvweave.decode.settings import ClusteredKV
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import Canvas
from kvweave.types import Decoding


class Holding:
    """The KV of a text that grows from a prompt: on `canvas`, which it owns, or on flash as `kv` says.

    Where the prefill has handed the layers of the canvas over, it is on flash already. Close it: files on flash go with
    it. Raises InvalidRequest for a `kv` other than the one that they were handed over for.
    """

    def __init__(self, adapter: Adapter, canvas: Canvas, kv: ClusteredKV | None = None) -> None:
        self.canvas = canvas
        self._retrieved = entered(canvas)
        self._adapter, self._kv = adapter, kv
        if self._retrieved is not None:
            self._kv = self._retrieved.settings
            if kv not in (None, self._kv):
                self.close()
                raise InvalidRequest(
                    f"the prompt was prefilled for {self._kv} and is to be decoded as {kv}; name one"
                )

    def move(self, token_ids: Sequence[int], question_tokens: int) -> None:
        """Move what the canvas holds, all of `token_ids`, to flash, if that is where it is to lie; see `enter`."""
        if self._kv is not None and self._retrieved is None:
            self._retrieved = enter(self._adapter, self.canvas, token_ids, self._kv, question_tokens)

    @property
    def on_canvas(self) -> bool:
        """Whether it lies in memory as the model's own attention reads it."""
        return self._retrieved is None

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """The logits (1, vocab) that follow `token_ids`, the last of which is not held yet."""
        if not self.outgrown(len(token_ids)):
            held = self.canvas if self._retrieved is None else self._retrieved
            return self._adapter.step(held, token_ids[-1])
        self.close()
        if self._kv is not None:
            self._retrieved, logits = computed(self._adapter, token_ids, self._kv)
            return logits
        self.canvas = self._adapter.canvas(len(token_ids))
        every_row = self._adapter.rows(torch.arange(len(token_ids)))
        return self._adapter.compute(self.canvas, token_ids, every_row)

    def outgrown(self, tokens: int) -> bool:
        """Whether a text of that length is computed again, since its last token needs other rotary frequencies.

        On a canvas with positions or a continuation of its own none is, since it would become another text; a step says so.
        """
        return self._adapter.outgrows(tokens) and (self._retrieved is not None or self.canvas.plain)

    @property
    def cost(self) -> Decoding | None:
        """What retrieval has read and held so far; None on a canvas."""
        return None if self._retrieved is None else self._retrieved.counts.per_token()

    def close(self) -> None:
        """Close the files, if there are any."""
        if self._retrieved is not None:
            self._retrieved.close()


class Standing:
    """KV that grows where it is and outlives the reply: a conversation's. Its owner closes it.

    `anew` has its owner compute all tokens of a text again, where the KV `held` cannot be gone on with; it returns what
    holds them then, and the logits (1, vocab) behind them.
    """

    def __init__(
        self, adapter: Adapter, held: RetrievedKV, anew: Callable[[Sequence[int]], tuple[RetrievedKV, Tensor]]
    ) -> None:
        self.held = held
        self._adapter, self._anew = adapter, anew

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """The logits (1, vocab) that follow `token_ids`, the last of which is not held yet."""
        if not self._adapter.outgrows(len(token_ids)):
            return self._adapter.step(self.held, token_ids[-1])
        self.held, logits = self._anew(token_ids)
        return logits

    @property
    def cost(self) -> Decoding | None:
        """What retrieval has read and held so far."""
        return self.held.counts.per_token()
