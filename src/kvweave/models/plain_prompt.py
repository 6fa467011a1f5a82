"""Prompts without chunks: a chat as the model's own chat template writes it, or a text as it is.

They are cut into blocks of a fixed length, so that a later prompt that begins with the same tokens finds their KV, whatever
the tokens mean (vLLM's automatic prefix caching, with larger blocks).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvweave.errors import InvalidRequest
from kvweave.types import Message, ReplyFormat, Span, TokenizedPrompt

if TYPE_CHECKING:
    from kvweave.models.prompt import PromptTemplate

BLOCK_TOKENS: Final = 128
"""Tokens of a block. A block is one entry of the store: smaller ones find more, and cost more look-ups and writes."""


def chat_in_blocks(
    template: "PromptTemplate", messages: Sequence[Message], *, think: bool = False
) -> TokenizedPrompt:
    """Return a chat as blocks; raises InvalidRequest if there is nothing to answer or the template refuses the messages."""
    if not messages or messages[-1].role == "assistant":
        raise InvalidRequest("the chat has nothing to answer: let its last message be the user's")
    ids, reply = template.render_chat(messages, think=think)
    return _in_blocks(ids, reply)


def text_in_blocks(template: "PromptTemplate", text: str) -> TokenizedPrompt:
    """Return a text as blocks, its reply to be read as it is; raises InvalidRequest if there is nothing to continue."""
    ids = template.text_ids(text)
    if not ids:
        raise InvalidRequest(
            "the prompt is empty, and the model has no token that begins a text: give some text"
        )
    return _in_blocks(ids, ReplyFormat(thoughts="none"))


def _in_blocks(ids: Sequence[int], reply: ReplyFormat) -> TokenizedPrompt:
    """Return ids, one at least, cut into blocks; the last one, which always has tokens, is the question span."""
    last = (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    blocks = [
        Span("chunk", start, start + BLOCK_TOKENS, number)
        for number, start in enumerate(range(0, last, BLOCK_TOKENS))
    ]
    spans = (Span("system", 0, 0), *blocks, Span("question", last, len(ids)))
    return TokenizedPrompt(tuple(ids), spans, (last, len(ids)), reply)
