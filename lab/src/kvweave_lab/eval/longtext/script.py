"""What a long text says, before it is tokens: an opening, then turn after turn without an end.

Knows nothing of tokenizers, lengths or models.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """New sentences, then one that ends in something said long before.

    Attributes:
        told: sentences that say something new; natural text stands between them.
        asks: whether `lead` is a question; else it is the beginning of a sentence.
        lead: what stands before the reply.
        reply: what the text goes on with.
        value: the end of the reply, which counts: one word that was said before.
        rest: the end of the sentence behind the reply.
    """

    told: tuple[str, ...]
    asks: bool
    lead: str
    reply: str
    value: str
    rest: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """Sentences of the prompt, and turns as long as they are drawn."""

    opening: tuple[str, ...]
    turns: Iterator[Turn]
