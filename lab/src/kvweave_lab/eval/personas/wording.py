"""Long replies: a computed short answer, and natural text around it up to a drawn length, for costs alone.

The reference model answers in a few words. So that decoding costs what it costs in PerCache's evaluation, where answers
have 136 tokens on average (§5.5), a reply is that answer, followed alternately by sentences from elsewhere and sentences
quoted from the retrieved chunks. Its tokens are forced, not chosen by the model. Quality is scored on the short answer.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Final

from kvweave_lab.eval.world import DEV, Haystack

LEAST_TOKENS: Final = 60
MOST_TOKENS: Final = 150
LIMIT_TOKENS: Final = 160
"""The limit of a long reply, which no reply reaches."""

_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+")


class LongReplies:
    """Makes long replies; equal arguments give equal replies.

    Args:
        tokenize: returns the token ids of a text.
        decode: returns the text of token ids.
    """

    def __init__(
        self, tokenize: Callable[[str], Sequence[int]], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._tokenize, self._decode = tokenize, decode
        self._elsewhere = [text for document in Haystack.of_split(DEV).sentences() for text in document]
        self._short: dict[str, str] = {}

    def reply(self, short: str, chunks: Sequence[str], seed: str) -> tuple[str, tuple[int, ...]]:
        """Return a reply of 60 to 150 tokens that begins with a short answer: its text, and its token ids.

        `chunks` are the texts that it quotes, about half of its tokens; `seed` decides length and sentences.
        """
        rng = random.Random(f"{seed} {short}")
        length = rng.randint(LEAST_TOKENS, MOST_TOKENS)
        quotable = [part.strip() for text in chunks for part in _SENTENCE.split(text) if part.strip()]
        start = rng.randrange(len(quotable)) if quotable else 0
        parts = [f"{short.rstrip('.')}."]
        own = total = len(self._tokenize(parts[0]))
        while total < length:
            if quotable and 2 * own > total:
                parts.append(quotable[(start + len(parts)) % len(quotable)])
                total += len(self._tokenize(parts[-1]))
            else:
                parts.append(rng.choice(self._elsewhere))
                own += len(self._tokenize(parts[-1]))
                total += len(self._tokenize(parts[-1]))
        ids = self._tokenize(" ".join(parts))[:length]
        text = self._decode(ids).strip()
        self._short[text] = short
        return text, tuple(ids)

    def short(self, text: str) -> str:
        """Return the short answer in a reply made here; any other text as it is."""
        return self._short.get(text, text)
