"""The KV of a text while it is decoded: in memory, or offloaded to a file. Knows nothing of how tokens are chosen."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvweave.decode.handoff import offload, offloaded_cache_of, prefill_offloaded
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import OffloadSettings
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache
from kvweave.models.model_state import ModelState
from kvweave.models.snapshot_adapter import SnapshotAdapter
from kvweave.results import DecodeStats


class DecodeState:
    """The KV of a text that grows from a prompt: in `kv_cache`, which it owns, or offloaded as `kv` says.

    Where the prefill has streamed the layers to a file, they are offloaded already. Closing it deletes the file.

    Raises:
        InvalidRequest: `kv` differs from what the prefill offloaded for.
    """

    def __init__(self, adapter: Adapter, kv_cache: FusedCache, kv: OffloadSettings | None = None) -> None:
        self.kv_cache = kv_cache
        self._offloaded = offloaded_cache_of(kv_cache)
        self._adapter, self._kv = adapter, kv
        if self._offloaded is not None:
            self._kv = self._offloaded.settings
            if kv not in (None, self._kv):
                self.close()
                raise InvalidRequest(
                    f"the prompt was prefilled for {self._kv} and is to be decoded as {kv}; name one"
                )

    def offload(self, token_ids: Sequence[int], question_tokens: int) -> None:
        """Offload the KV of all `token_ids` if the settings say so; see `offload`."""
        if self._kv is not None and self._offloaded is None:
            self._offloaded = offload(self._adapter, self.kv_cache, token_ids, self._kv, question_tokens)

    @property
    def in_memory(self) -> bool:
        """Whether all KV is in memory, as the model's own attention reads it."""
        return self._offloaded is None

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (1, vocab) after `token_ids`, whose last token is not in the KV yet."""
        if not self.needs_rope_rescale(len(token_ids)):
            kv = self.kv_cache if self._offloaded is None else self._offloaded
            return self._adapter.step(kv, token_ids[-1])
        self.close()
        if self._kv is not None:
            self._offloaded, logits = prefill_offloaded(self._adapter, token_ids, self._kv)
            return logits
        self.kv_cache = self._adapter.new_cache(len(token_ids))
        every_row = self._adapter.rows(torch.arange(len(token_ids)))
        return self._adapter.compute(self.kv_cache, token_ids, every_row)

    def needs_rope_rescale(self, tokens: int) -> bool:
        """Return whether a text of this length is computed again, since its last token needs other rotary frequencies.

        A cache with its own positions or continuation is not: it would become another text, and the step raises.
        """
        return self._adapter.needs_rope_rescale(tokens) and (
            self._offloaded is not None or self.kv_cache.plain
        )

    @property
    def cost(self) -> DecodeStats | None:
        """What offloaded decoding has read and kept in memory so far; None if all KV is in memory."""
        return None if self._offloaded is None else self._offloaded.counts.per_token()

    def close(self) -> None:
        """Delete the files, if there are any."""
        if self._offloaded is not None:
            self._offloaded.close()


class PersistentDecodeState:
    """A conversation's KV: it grows in its files and outlives the reply. Its owner closes it.

    `recompute` computes all tokens of a text from scratch, where the KV cannot be extended; it returns the new KV and
    the logits (1, vocab) after the text.
    """

    def __init__(
        self,
        adapter: Adapter,
        kv: OffloadedCache,
        recompute: Callable[[Sequence[int]], tuple[OffloadedCache, Tensor]],
    ) -> None:
        self.kv = kv
        self._adapter, self._recompute = adapter, recompute

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (1, vocab) after `token_ids`, whose last token is not in the KV yet."""
        if not self._adapter.needs_rope_rescale(len(token_ids)):
            return self._adapter.step(self.kv, token_ids[-1])
        self.kv, logits = self._recompute(token_ids)
        return logits

    def hold(self, token_ids: Sequence[int]) -> None:
        """Make the KV hold a finished text: the KV may lack its last token, or hold tokens behind its end.

        Nothing can be removed from the files, so a text that lost tokens is computed again.
        """
        if self.kv.get_seq_length() > len(token_ids):
            self.kv, _ = self._recompute(token_ids)
        elif self.kv.get_seq_length() < len(token_ids):
            self.advance(token_ids)

    @property
    def cost(self) -> DecodeStats | None:
        """What offloaded decoding has read and kept in memory so far."""
        return self.kv.counts.per_token()


class PlainDecodeState:
    """The state of a model that is run plainly, all in memory. It only grows: no token can be taken back."""

    cost: DecodeStats | None = None

    def __init__(self, adapter: SnapshotAdapter, state: ModelState) -> None:
        self._adapter, self._state = adapter, state

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (1, vocab) after `token_ids`, whose last token is not in the state yet."""
        return self._adapter.extend(self._state, token_ids[-1:])
