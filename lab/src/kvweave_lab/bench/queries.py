"""Questions as far as a cache of chunk KV sees them: which chunks each retrieves, and in which order.

FusionRAG's simulation (§5.3.3) draws a share of the chunks from the documents that are known beforehand, another from
documents that are uploaded meanwhile and shared, and has the rest appear once. What the paper does not say is a setting
here. Knows nothing about caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvweave.errors import InvalidRequest

Query = tuple[int, ...]
"""The chunks of one question in the order of retrieval, each named by a number."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """How questions are drawn.

    Attributes:
        queries: how many questions.
        chunks_per_query: how many chunks each retrieves, all different.
        known_share: of the chunks that questions retrieve, those of documents that are there beforehand, 0..1.
        shared_share: those of documents that come later and that several questions retrieve from; the rest are unique.
        known_chunks: how many chunks there are beforehand: the numbers from 0.
        shared_chunks: how many come later and are shared: the numbers after them. Unique ones follow.
        exponent: of popularity: in both groups the n-th chunk is retrieved in proportion to n^-exponent.
        shuffled: share of the questions whose chunks come in any order. In all others the order is the same for all: by
            number, so that the most popular stand first and unique ones last, which is the best for prefixes.
        repeated: share of the questions that retrieve what an earlier one did, in its order; unique chunks are new.
        seed: of all that is drawn.
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
        """The number of the first chunk that no other question retrieves."""
        return self.known_chunks + self.shared_chunks


def draw_queries(traffic: Traffic) -> list[Query]:
    """The questions one after the other; the same for the same traffic."""
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
            query = _ordered(query, random, traffic.shuffled)
        for place, chunk in enumerate(query):
            if chunk >= traffic.first_unique:
                query[place], unique = unique, unique + 1
        queries.append(tuple(int(chunk) for chunk in query))
    return queries


def _ordered(query: Sequence[int], random: np.random.Generator, shuffled: float) -> list[int]:
    if random.random() < shuffled:
        return [query[place] for place in random.permutation(len(query))]
    return sorted(query)


def _popularity(chunks: int, exponent: float) -> np.ndarray:
    weights: np.ndarray = np.arange(1, chunks + 1, dtype=float) ** -exponent
    return np.asarray(weights / weights.sum())
