"""The log probabilities of a reply's tokens, and of the likeliest other tokens at each place."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor

from kvweave.results import LikelyToken, TokenLogprob

_WINDOW_TOKENS: Final = 8  # a tokenizer that looks at earlier tokens looks no further back


class LogprobRecorder:
    """Records a reply's tokens as they are chosen.

    Args:
        tokenizer: the model's.
        count: how many of the likeliest tokens to record at each place.
    """

    def __init__(self, tokenizer: Any, count: int) -> None:
        self._tokenizer, self._count = tokenizer, count
        self.tokens: list[TokenLogprob] = []

    def record(self, before: Sequence[int], token: int, logits: Tensor) -> None:
        """Record the token that was chosen by logits (1, vocab) after the tokens `before`, of the reply alone.

        The softmax is over the model's own logits, in float32.
        """
        logprobs = logits[0].float().log_softmax(dim=-1)  # (vocab,)
        values, ids = logprobs.topk(min(self._count, logprobs.numel()))
        window = before[-_WINDOW_TOKENS:]
        likeliest = tuple(
            LikelyToken(other, self._added(window, other), value)
            for other, value in zip(ids.tolist(), values.tolist(), strict=True)
        )
        self.tokens.append(TokenLogprob(token, self._added(window, token), float(logprobs[token]), likeliest))

    def _added(self, before: Sequence[int], token: int) -> str:
        """Return what a token adds to the text before it."""
        text, longer = self._decode(before), self._decode([*before, token])
        return longer[len(text) :] if longer.startswith(text) else self._decode([token])

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)
