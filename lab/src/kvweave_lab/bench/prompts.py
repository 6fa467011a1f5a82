"""Prompts of a given length to measure on; what they say does not matter, how long they are does."""

import torch

from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.types import Prompt

_WORDS = "The room number of Paris is 706. The sky was sunny that morning. Aaron lives in Berlin.".split()
_QUESTION = "What is the room number of Paris?"
_PLACES = ("Paris", "Berlin", "Aaron", "the sky", "that morning")


def prompt_of_chunks(adapter: Adapter, context_tokens: int, chunk_tokens: int) -> Prompt:
    """A question over chunks of `chunk_tokens`, `context_tokens` in all, no two alike; equal for equal arguments.

    Raises InvalidRequest for a context that is not made of whole chunks.
    """
    if chunk_tokens < 1 or context_tokens < chunk_tokens or context_tokens % chunk_tokens:
        raise InvalidRequest(
            f"a context of {context_tokens} tokens is not made of chunks of {chunk_tokens}; give a multiple"
        )
    numbers = range(context_tokens // chunk_tokens)
    return Prompt(_QUESTION, tuple(chunk_text(adapter, number, chunk_tokens) for number in numbers))


def question_text(number: int) -> str:
    """A question unlike those of other numbers, about as long as they are."""
    return f"What is the room number of {_PLACES[number % len(_PLACES)]} on day {number}?"


def chunk_text(adapter: Adapter, number: int, tokens: int) -> str:
    """A chunk of about so many tokens, unlike those of other numbers; equal for equal arguments."""
    generator = torch.Generator().manual_seed(number)
    picked = torch.randint(len(_WORDS), (tokens,), generator=generator).tolist()
    text = " ".join(_WORDS[pick].strip(".") for pick in picked)
    ids = adapter.tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    return str(adapter.tokenizer.decode(ids))
