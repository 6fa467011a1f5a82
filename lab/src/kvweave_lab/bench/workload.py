"""What is asked in measurements: traffic of questions, prompts of a given length, and stores with prepared chunks.

A question of the traffic is only the chunks that it retrieves, in order. FusionRAG's simulation (§5.3.3) draws some
chunks from documents that are known beforehand, some from documents that are uploaded later and shared, and the rest
appear once. What the paper leaves open is a setting here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.offline import prepare
from kvweave.recipes.prepare import Prepare
from kvweave.recipes.recipe import Recipe
from kvweave.types import Prompt

_WORDS = "The room number of Paris is 706. The sky was sunny that morning. Aaron lives in Berlin.".split()
_QUESTION = "What is the room number of Paris?"
_PLACES = ("Paris", "Berlin", "Aaron", "the sky", "that morning")
Query = tuple[int, ...]
"""The chunk numbers of one question, in the order of retrieval."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How questions are drawn.

    Attributes:
        queries: number of questions.
        chunks_per_query: chunks of each question, all different.
        known_share: share of retrieved chunks that come from documents known beforehand, 0..1.
        shared_share: share that comes from documents uploaded later and used by several questions; the rest are unique.
        known_chunks: number of chunks known beforehand; their numbers start at 0.
        shared_chunks: number of shared chunks uploaded later; their numbers follow. Unique chunks come last.
        exponent: of popularity: in both groups the n-th chunk is retrieved in proportion to n^-exponent.
        shuffled: share of the questions whose chunks are in random order. The others are sorted by number: the most
            popular chunks first and unique ones last, which is best for prefix caches.
        repeated: share of the questions that retrieve the chunks of an earlier one, in its order; unique chunks are new.
        seed: of everything drawn.
    """

    queries: int = 1000
    chunks_per_query: int = 5
    known_share: float = 0.6
    shared_share: float = 0.3
    known_chunks: int = 1000
    shared_chunks: int = 500
    exponent: float = 1.0
    shuffled: float = 1.0
    repeated: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("known_share", "shared_share", "shuffled", "repeated"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InvalidRequest(f"{name} is {value}; it is a share between 0 and 1")
        if self.known_share + self.shared_share > 1 + 1e-9:
            raise InvalidRequest(
                f"known_share {self.known_share} and shared_share {self.shared_share} are more than 1 together"
            )
        fewest = min(self.known_chunks, self.shared_chunks)
        if not 1 <= self.chunks_per_query <= fewest:
            raise InvalidRequest(
                f"{self.chunks_per_query} chunks per query cannot be drawn from groups of {self.known_chunks} and "
                f"{self.shared_chunks}; give 1 to {fewest}"
            )

    @property
    def first_unique(self) -> int:
        """The number of the first unique chunk."""
        return self.known_chunks + self.shared_chunks


def draw_queries(traffic: Traffic) -> list[Query]:
    """Draw the questions in order; equal traffic gives equal questions."""
    random = np.random.default_rng(traffic.seed)
    popularity = [
        _popularity(size, traffic.exponent) for size in (traffic.known_chunks, traffic.shared_chunks)
    ]
    unique_share = max(0.0, 1 - traffic.known_share - traffic.shared_share)
    shares = np.array([traffic.known_share, traffic.shared_share, unique_share])
    queries: list[Query] = []
    unique = traffic.first_unique
    for _ in range(traffic.queries):
        if queries and random.random() < traffic.repeated:
            query = list(queries[random.integers(len(queries))])
        else:
            known, shared, new = random.multinomial(traffic.chunks_per_query, shares / shares.sum())
            query = [
                *random.choice(traffic.known_chunks, known, replace=False, p=popularity[0]),
                *(
                    traffic.known_chunks
                    + random.choice(traffic.shared_chunks, shared, replace=False, p=popularity[1])
                ),
                *[traffic.first_unique] * new,
            ]
            query = _in_order(query, random, traffic.shuffled)
        for place, chunk in enumerate(query):
            if chunk >= traffic.first_unique:
                query[place], unique = unique, unique + 1
        queries.append(tuple(int(chunk) for chunk in query))
    return queries


def _in_order(query: Sequence[int], random: np.random.Generator, shuffled: float) -> list[int]:
    if random.random() < shuffled:
        return [query[place] for place in random.permutation(len(query))]
    return sorted(query)


def _popularity(chunks: int, exponent: float) -> np.ndarray:
    weights: np.ndarray = np.arange(1, chunks + 1, dtype=float) ** -exponent
    return np.asarray(weights / weights.sum())


def prompt_of_chunks(adapter: Adapter, context_tokens: int, chunk_tokens: int) -> Prompt:
    """Return a question over distinct chunks of `chunk_tokens`, `context_tokens` in all; equal for equal arguments.

    The text is meaningless. Raises InvalidRequest for a context that is not made of whole chunks.
    """
    if chunk_tokens < 1 or context_tokens < chunk_tokens or context_tokens % chunk_tokens:
        raise InvalidRequest(
            f"a context of {context_tokens} tokens is not made of chunks of {chunk_tokens}; give a multiple"
        )
    numbers = range(context_tokens // chunk_tokens)
    return Prompt(_QUESTION, tuple(chunk_text(adapter, number, chunk_tokens) for number in numbers))


def question_text(number: int) -> str:
    """Return the question with this number; all have about the same length."""
    return f"What is the room number of {_PLACES[number % len(_PLACES)]} on day {number}?"


def chunk_text(adapter: Adapter, number: int, tokens: int) -> str:
    """Return the chunk with this number, of about `tokens` tokens; equal for equal arguments."""
    return words_text(adapter.tokenizer, number, tokens)


def words_text(tokenizer: Any, number: int, tokens: int) -> str:
    """Return the chunk with this number for a tokenizer of transformers, without its model."""
    generator = torch.Generator().manual_seed(number)
    picked = torch.randint(len(_WORDS), (tokens,), generator=generator).tolist()
    text = " ".join(_WORDS[pick].strip(".") for pick in picked)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    return str(tokenizer.decode(ids))


class PreparedStores:
    """Stores of the same chunks, one for each way of preparing. A context manager, which closes them.

    The constructor prepares the chunks for every recipe, features included.
    """

    def __init__(
        self, adapter: Adapter, folder: Path, chunks: Sequence[str], recipes: Sequence[Recipe]
    ) -> None:
        self._stores: list[tuple[Prepare, ChunkStore]] = []
        for recipe in recipes:
            if not any(known == recipe.prepare for known, _ in self._stores):
                store = ChunkStore(folder / str(len(self._stores)), limit_bytes=2**62)
                self._stores.append((recipe.prepare, store))
            prepare(adapter, self.of(recipe), chunks, recipe=recipe)

    def of(self, recipe: Recipe) -> ChunkStore:
        """Return the store that is prepared for a recipe."""
        return next(store for known, store in self._stores if known == recipe.prepare)

    def files(self) -> list[Path]:
        """Return the entry files of the first store."""
        return sorted(self._stores[0][1].folder.glob("??/*.safetensors"))

    def close(self) -> None:
        """Close all stores; closing twice is allowed."""
        for _, store in self._stores:
            store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
