"""What a reply may be, checked by the model in one pass instead of being decoded token by token (speculative decoding).

Two things foretell it. An answer to a question that is near the one asked, and perhaps another, must not be given; but where
the model would say the same, it is there already: a draft. And replies quote the text they rest on, which is the prompt: where
the reply's last tokens stand in it, the reply may go on as it does there (prompt lookup). What is foretold is run as rows of one
pass, and holds as far as each token is what decoding would have chosen; so replies are the same, and come in fewer passes.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kvweave.config import GenerationConfig
from kvweave.engine.decode_state import DecodeState
from kvweave.models.adapter import Adapter
from kvweave.types import Decoding

_FIRST_TOLD: Final = 7
"""So many tokens are told at first: with the reply's last one, rows that cost little more than one where reading the model's
weights is what takes the time."""
_MOST_TOLD: Final = 31
_COMPARED: Final = 8
"""Of places in the prompt that go on from the reply's last token, the one that agrees furthest back, so many tokens at most."""


def drafts_of(adapter: Adapter, text: str) -> list[tuple[int, ...]]:
    """Token ids of an earlier reply's text, with a space before it and without: replies are kept without."""
    return [adapter.template.text_ids(each) for each in (text, f" {text}")]


class PromptLookupDrafter:
    """Tells how a reply may go on, from what is known beside the model. For one reply.

    The more of what is told stands, the more is told at a time, and the other way round; and a quote that begins wrong makes
    the next one wait for a place in the prompt that agrees with more of the reply's last tokens.

    Args:
        prompt_ids: token ids that the reply may quote.
        drafts: what the reply may be, without the token that ends it, the likeliest first.
        most_quoted: tokens that are looked up in the prompt at a time; 0 for none.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        drafts: Sequence[Sequence[int]] = (),
        most_quoted: int = GenerationConfig().prompt_lookup_tokens,
    ) -> None:
        self._prompt = torch.tensor(prompt_ids, dtype=torch.long)
        self._drafts = [tuple(draft) for draft in drafts]
        self._most_quoted = most_quoted
        self._most = _FIRST_TOLD
        self._agreeing = 1  # so many of the reply's last tokens have to stand in the prompt
        self._quotes = False  # whether what was told last is from there
        self._told = 0  # how many tokens that were

    def next(self, said: Sequence[int], room: int = _MOST_TOLD) -> list[int]:
        """Token ids that may follow the reply so far, which has at least one; at most `room`, none where nothing tells."""
        so_far = tuple(said)
        self._drafts = [draft for draft in self._drafts if draft[: len(so_far)] == so_far]
        drafted = next((draft for draft in self._drafts if len(draft) > len(so_far)), so_far)[len(so_far) :]
        self._quotes = not drafted
        told = list(drafted[: min(self._most, room)]) or self._quote(so_far)[:room]
        self._told = len(told)
        return told

    def held(self, stood: int) -> None:
        """Of what was told last, so many tokens stood."""
        if stood == self._told:
            self._most = min(_MOST_TOLD, 2 * self._most + 1) if self._told >= self._most else self._most
            self._agreeing = 1
        elif 2 * stood < self._told:
            self._most = max(1, self._most // 2)
            if self._quotes and not stood:
                self._agreeing = min(_COMPARED, self._agreeing + 1)

    def _quote(self, said: tuple[int, ...]) -> list[int]:
        """What follows in the prompt where it agrees longest with the end of the reply; if possible, enough of it."""
        most = min(self._most, self._most_quoted)
        if not most or len(said) < self._agreeing:
            return []
        places = (self._prompt[:-1] == said[-1]).nonzero()[:, 0]
        for back in range(1, min(_COMPARED, len(said))):
            agreeing = places[(places >= back) & (self._prompt[places - back] == said[-1 - back])]
            if not agreeing.numel():
                if back < self._agreeing:
                    return []
                break
            places = agreeing
        if not places.numel():
            return []
        roomy = places[places < len(self._prompt) - most]
        start = int((roomy if roomy.numel() else places)[-1]) + 1
        return self._prompt[start : start + most].tolist()


class SpeculativeDecoder:
    """KV of a text that grows, as `DecodeState`, and what is foretold of how it goes on. For greedy decoding, on a canvas.

    Args:
        adapter: the model.
        held: what holds the prompt.
        prompt_tokens: how many tokens that is.
        most: tokens of the reply at most.
        foretelling: what tells.

    Attributes:
        foretold: how many of the reply's tokens were told and stood.
    """

    def __init__(
        self,
        adapter: Adapter,
        held: DecodeState,
        prompt_tokens: int,
        most: int,
        foretelling: PromptLookupDrafter,
    ) -> None:
        self._adapter, self._held, self._foretelling = adapter, held, foretelling
        self._prompt_tokens, self._most = prompt_tokens, most
        self._checked: list[int] = []  # the token that had been said last, and what was told to follow it
        self._logits: Tensor | None = None  # behind each of these, (k, vocab)
        self._stood = 0  # of those told, so many
        self.accepted_draft_tokens = 0

    def advance(self, token_ids: Sequence[int]) -> Tensor:
        """The logits (1, vocab) that follow `token_ids`, of which all but the last were asked about before."""
        if self._logits is not None:
            if self._checked[self._stood + 1 : self._stood + 2] == [token_ids[-1]]:
                self._stood += 1
                self.accepted_draft_tokens += 1
                return self._logits[self._stood][None]
            self._end(token_ids)
        said = token_ids[self._prompt_tokens :]
        told = self._foretelling.next(said, room=max(0, self._most - 1 - len(said)))
        if not told or not self._adapter.keeps_frequencies(self._held.kv_cache, 1 + len(told)):
            return self._held.advance(token_ids)
        self._checked, self._stood = [said[-1], *told], 0
        self._logits = self._adapter.follow(self._held.kv_cache, self._checked)
        return self._logits[0][None]

    def stop(self, tokens: int) -> None:
        """The text is over, or goes on otherwise: leave `tokens` on the canvas at most."""
        if self._logits is not None:
            self._held.kv_cache.shrink(tokens)
        self._logits = None

    @property
    def cost(self) -> Decoding | None:
        """As `DecodeState`."""
        return self._held.cost

    def _end(self, token_ids: Sequence[int]) -> None:
        """Forget what was told and did not stand, which the canvas holds from the last token on."""
        self.stop(len(token_ids) - 1)
        self._foretelling.held(self._stood)
