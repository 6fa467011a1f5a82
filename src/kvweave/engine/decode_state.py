"""Where the KV of a text lies while it is being generated: on its canvas, or on flash.

Knows nothing of how tokens are chosen.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvweave.decode.handoff import computed, enter, entered
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache
from kvweave.types import Decoding


class DecodeState:
    """The KV of a text that grows from a prompt: on `kv_cache`, which it owns, or on flash as `kv` says.

    Where the prefill has handed the layers of the canvas over, it is on flash already. Close it: files on flash go with
    it. Raises InvalidRequest for a `kv` other than the one that they were handed over for.
    """

    def __init__(self, adapter: Adapter, kv_cache: FusedCache, kv: OffloadSettings | None = None) -> None:
        self.kv_cache = kv_cache
        self._retrieved = entered(kv_cache)
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
            self._retrieved = enter(self._adapter, self.kv_cache, token_ids, self._kv, question_tokens)

    @property
    def on_kv_cache(self) -> bool:
        """Whether it lies in memory as the model's own attention reads it."""
        return self._retrieved is None

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """The logits (1, vocab) that follow `token_ids`, the last of which is not held yet."""
        if not self.needs_rope_rescale(len(token_ids)):
            held = self.kv_cache if self._retrieved is None else self._retrieved
            return self._adapter.step(held, token_ids[-1])
        self.close()
        if self._kv is not None:
            self._retrieved, logits = computed(self._adapter, token_ids, self._kv)
            return logits
        self.kv_cache = self._adapter.new_cache(len(token_ids))
        every_row = self._adapter.rows(torch.arange(len(token_ids)))
        return self._adapter.compute(self.kv_cache, token_ids, every_row)

    def needs_rope_rescale(self, tokens: int) -> bool:
        """Whether a text of that length is computed again, since its last token needs other rotary frequencies.

        On a canvas with positions or a continuation of its own none is, since it would become another text; a step says so.
        """
        return self._adapter.needs_rope_rescale(tokens) and (
            self._retrieved is not None or self.kv_cache.plain
        )

    @property
    def cost(self) -> Decoding | None:
        """What retrieval has read and held so far; None on a canvas."""
        return None if self._retrieved is None else self._retrieved.counts.per_token()

    def close(self) -> None:
        """Close the files, if there are any."""
        if self._retrieved is not None:
            self._retrieved.close()


class PersistentDecodeState:
    """KV that grows where it is and outlives the reply: a conversation's. Its owner closes it.

    `anew` has its owner compute all tokens of a text again, where the KV `held` cannot be gone on with; it returns what
    holds them then, and the logits (1, vocab) behind them.
    """

    def __init__(
        self,
        adapter: Adapter,
        held: OffloadedCache,
        anew: Callable[[Sequence[int]], tuple[OffloadedCache, Tensor]],
    ) -> None:
        self.held = held
        self._adapter, self._anew = adapter, anew

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """The logits (1, vocab) that follow `token_ids`, the last of which is not held yet."""
        if not self._adapter.needs_rope_rescale(len(token_ids)):
            return self._adapter.step(self.held, token_ids[-1])
        self.held, logits = self._anew(token_ids)
        return logits

    @property
    def cost(self) -> Decoding | None:
        """What retrieval has read and held so far."""
        return self.held.counts.per_token()
