"""Requests to a server: which documents each one brings, its question, and when it arrives.

Documents are drawn by popularity (Zipf), arrivals from a Poisson process. Every system gets the same requests at the same
moments: both depend on the settings and the seed alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvweave_lab.bench.workload import Query, Traffic, draw_queries, question_text, words_text


@dataclass(frozen=True, slots=True)
class ServedTraffic:
    """What is asked of a server.

    Attributes:
        documents: number of documents in the corpus.
        per_request: documents of a request, all different.
        document_tokens: tokens of each document.
        exponent: of popularity: the n-th document is drawn in proportion to n^-exponent.
        shuffled: share of requests whose documents are in random order; the others are sorted by popularity, which is best
            for prefix caches.
        repeated: share of requests that bring an earlier request's documents in its order.
        new_tokens: most tokens of an answer.
        seed: of everything drawn.
    """

    documents: int = 200
    per_request: int = 8
    document_tokens: int = 512
    exponent: float = 1.0
    shuffled: float = 1.0
    repeated: float = 0.0
    new_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        self._as_queries(1)  # raises InvalidRequest for impossible ones

    def _as_queries(self, count: int) -> Traffic:
        return Traffic(
            queries=count,
            chunks_per_query=self.per_request,
            known_share=1.0,
            shared_share=0.0,
            known_chunks=self.documents,
            shared_chunks=self.per_request,
            exponent=self.exponent,
            shuffled=self.shuffled,
            repeated=self.repeated,
            seed=self.seed,
        )

    def draw(self, count: int) -> "list[ServedRequest]":
        """Draw requests in order; a longer draw begins with the same ones."""
        queries = draw_queries(self._as_queries(count))
        return [ServedRequest(n, query, question_text(n)) for n, query in enumerate(queries)]

    def covering(self) -> "list[ServedRequest]":
        """Return requests that bring every document once as the first, and once after the one before it.

        After them, a server has stored what each document's KV is prepared from: alone, or after the previous document.
        """
        pairs = [(number, (number + 1) % self.documents) for number in range(self.documents)]
        return [
            ServedRequest(-1 - number, pair, "Which rooms are named?") for number, pair in enumerate(pairs)
        ]


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request: its number, its documents in order, and its question, which no other request of the stream has."""

    number: int
    documents: Query
    question: str


class Corpus:
    """The documents' texts, of about `document_tokens` each; equal for equal tokenizer and numbers."""

    def __init__(self, tokenizer: Any, traffic: ServedTraffic) -> None:
        self._texts = [
            words_text(tokenizer, number, traffic.document_tokens) for number in range(traffic.documents)
        ]

    def texts(self, request: ServedRequest) -> tuple[str, ...]:
        """Return the texts of a request's documents, in its order."""
        return tuple(self._texts[number] for number in request.documents)


def arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """Return when requests arrive (seconds, from 0) at `rate` a second: a Poisson process. Only the scale depends on the rate."""
    gaps = np.random.default_rng(seed).exponential(size=count)
    gaps[0] = 0.0
    return [float(moment) for moment in np.cumsum(gaps) / rate]


def exact_prefix_share(requests: Sequence[ServedRequest], before: Sequence[ServedRequest]) -> float:
    """Return the share of documents that a prefix cache without limit finds: all before it came in this order earlier."""
    seen = {prefix for request in before for prefix in _prefixes(request.documents)}
    found = wanted = 0
    for request in requests:
        wanted += len(request.documents)
        found += sum(prefix in seen for prefix in _prefixes(request.documents))
        seen.update(_prefixes(request.documents))
    return found / max(1, wanted)


def _prefixes(documents: Query) -> list[Query]:
    return [documents[:end] for end in range(1, len(documents) + 1)]
