"""Speculative decoding: the model verifies several draft tokens in one pass instead of decoding them one by one.

Drafts come from two places. The cached answer to a near question is a draft: it must not be given, since the question
may be another one, but the model may well say the same. And replies quote the prompt: where the reply's last tokens
occur in the prompt, the tokens after them are a draft (prompt lookup). A draft token is accepted if decoding would have
chosen it, so replies do not change; they only come in fewer passes.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.decode.handoff import DecodeState
from kvweave.models.adapter import Adapter
from kvweave.results import DecodeStats

_FIRST_LENGTH: Final = 7
"""Length of the first draft in tokens. With the reply's last token, these rows cost little more than one row where
reading the model's weights takes most of the time."""
_MAX_LENGTH: Final = 31
_MAX_MATCH: Final = 8
"""Of several matching positions in the prompt, the longest match counts, up to this many tokens."""


class PromptLookupDrafter:
    """Proposes draft tokens for one reply, from earlier replies and from the prompt.

    The draft length grows while drafts are accepted and shrinks when they are rejected. After a quote that was rejected
    at its first token, the next one must match more of the reply's last tokens.

    Args:
        prompt_ids: token ids that the reply may quote.
        drafts: token ids that the reply may consist of, without an end token, the likeliest first.
        max_quote: the most tokens to quote from the prompt at a time; 0 for none.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        drafts: Sequence[Sequence[int]] = (),
        max_quote: int = GenerationConfig().prompt_lookup_tokens,
    ) -> None:
        self._prompt = torch.tensor(prompt_ids, dtype=torch.long)
        self._drafts = [tuple(draft) for draft in drafts]
        self._max_quote = max_quote
        self._length = _FIRST_LENGTH
        self._min_match = 1  # how many of the reply's last tokens a position in the prompt has to match
        self._quoted = False  # whether the last draft is from the prompt
        self._proposed = 0  # the length of the last draft

    def propose(self, reply: Sequence[int], room: int = _MAX_LENGTH) -> list[int]:
        """Return token ids that may follow a reply of one token or more; at most `room`, none without a draft."""
        so_far = tuple(reply)
        self._drafts = [draft for draft in self._drafts if draft[: len(so_far)] == so_far]
        drafted = next((draft for draft in self._drafts if len(draft) > len(so_far)), so_far)[len(so_far) :]
        self._quoted = not drafted
        proposed = list(drafted[: min(self._length, room)]) or self._quote(so_far)[:room]
        self._proposed = len(proposed)
        return proposed

    def record(self, accepted: int) -> None:
        """Adapt to how many tokens of the last draft were accepted."""
        if accepted == self._proposed:
            if self._proposed >= self._length:
                self._length = min(_MAX_LENGTH, 2 * self._length + 1)
            self._min_match = 1
        elif 2 * accepted < self._proposed:
            self._length = max(1, self._length // 2)
            if self._quoted and not accepted:
                self._min_match = min(_MAX_MATCH, self._min_match + 1)

    def _quote(self, reply: tuple[int, ...]) -> list[int]:
        """Return the prompt's tokens after the longest match of the reply's end, up to the length of a draft."""
        most = min(self._length, self._max_quote)
        if not most or len(reply) < self._min_match:
            return []
        places = (self._prompt[:-1] == reply[-1]).nonzero()[:, 0]
        for back in range(1, min(_MAX_MATCH, len(reply))):
            matching = places[(places >= back) & (self._prompt[places - back] == reply[-1 - back])]
            if not matching.numel():
                if back < self._min_match:
                    return []
                break
            places = matching
        if not places.numel():
            return []
        roomy = places[places < len(self._prompt) - most]
        start = int((roomy if roomy.numel() else places)[-1]) + 1
        return self._prompt[start : start + most].tolist()


class SpeculativeDecoder:
    """Decodes as `DecodeState` does, verifying drafts. For greedy decoding with all KV in memory.

    Args:
        adapter: the model.
        state: the KV of the prompt.
        prompt_tokens: the prompt's length.
        max_new_tokens: the reply's greatest length.
        drafter: proposes drafts.

    Attributes:
        accepted_draft_tokens: how many of the reply's tokens were accepted from drafts.
    """

    def __init__(
        self,
        adapter: Adapter,
        state: DecodeState,
        prompt_tokens: int,
        max_new_tokens: int,
        drafter: PromptLookupDrafter,
    ) -> None:
        self._adapter, self._state, self._drafter = adapter, state, drafter
        self._prompt_tokens, self._max_new_tokens = prompt_tokens, max_new_tokens
        self._verified: list[int] = []  # the reply's last token before the draft, and the draft
        self._logits: Tensor | None = None  # after each of these, (k, vocab)
        self._accepted = 0  # of the present draft
        self.accepted_draft_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits (1, vocab) after `token_ids`, all but the last of which earlier calls covered."""
        if self._logits is not None:
            if self._verified[self._accepted + 1 : self._accepted + 2] == [token_ids[-1]]:
                self._accepted += 1
                self.accepted_draft_tokens += 1
                return self._logits[self._accepted][None]
            self._drop_rejected(token_ids)
        reply = token_ids[self._prompt_tokens :]
        draft = self._drafter.propose(reply, room=max(0, self._max_new_tokens - 1 - len(reply)))
        if not draft or not self._adapter.stays_in_rope_regime(self._state.kv_cache, 1 + len(draft)):
            return self._state.advance(token_ids)
        self._verified, self._accepted = [reply[-1], *draft], 0
        self._logits = self._adapter.verify_draft(self._state.kv_cache, self._verified)
        return self._logits[0][None]

    def recompute(self, token_ids: Sequence[int]) -> Tensor:
        """As `DecodeState.recompute`; the present draft is dropped."""
        self._logits = None
        return self._state.recompute(token_ids)

    @property
    def cost(self) -> DecodeStats | None:
        return self._state.cost

    def _drop_rejected(self, token_ids: Sequence[int]) -> None:
        """Drop the rejected part of the draft; the KV holds it from the last token on."""
        self._state.kv_cache.truncate_appended(len(token_ids) - 1)
        self._logits = None
        self._drafter.record(self._accepted)
