"""What goes into the bank and comes out of it: plain values."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvweave.types import Source

Vector = npt.NDArray[np.float32]
Why = Literal["matched", "changed", "stale", "predicted", "prefilled"]
"""Why a question waits: it was given another one's answer; a document changed or went; new chunks fit it better; it is
expected to be asked; it is expected, and its KV was computed without the answer.
"""


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Settings under which a question was asked: an answer is given again only under equal ones.

    `recipe` is its full name, `ratio` or `coverage` the budget asked for (None: the recipe's own), `max_new_tokens`
    None where the default holds, `auxiliary` the small model that some recipes select with, `kv_budget` what decoding
    attended to (None: everything); how much memory that took is none of them.
    """

    recipe: str
    ratio: float | None
    coverage: float | None
    top_k: int
    max_new_tokens: int | None
    drop_chunks: bool
    auxiliary: str | None
    kv_budget: float | None


@dataclass(frozen=True, slots=True)
class Provenance:
    """What an answer rests on.

    Attributes:
        versions: of the documents whose chunks were found for the question.
        chunks: the found chunks, by the names they have in the index, best first.
        epoch: of the documents, read before anything was looked up.
    """

    versions: frozenset[str]
    chunks: tuple[str, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer in the bank.

    `question` is what it was given to, with `vector` (dimensions,), under `circumstances`; `similarity` (-1..1) the
    cosine between that question and the one asked. `chunks` are those that were found for it, `epoch` that of the
    documents when these were last seen to be the best. `made_at_s` is seconds since 1970.
    """

    id: int
    question: str
    vector: Vector
    circumstances: AnswerSettings
    similarity: float
    text: str
    sources: tuple[Source, ...]
    chunks: tuple[str, ...]
    epoch: int
    made_at_s: float


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A question without a usable answer, for whoever has time: asked again so, it gets one and waits no more."""

    question: str
    circumstances: AnswerSettings
    why: Why
    since_s: float


@dataclass(frozen=True, slots=True)
class AnswerCacheTotals:
    """What the bank holds and has done: questions, how many of them have an answer or wait for one, answers given."""

    questions: int
    answered: int
    waiting: int
    given: int
    bytes: int
    limit_bytes: int
