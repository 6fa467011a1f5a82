"""Values that go into the answer cache and come out of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvweave.options import AskOptions
from kvweave.results import Source

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]
else:
    Vector = Any  # listing documents takes half as long without numpy

PendingReason = Literal["matched", "changed", "stale", "asked", "predicted", "prefilled"]
"""Why a question has no usable answer.

matched: it was answered with another question's answer; changed: a document behind its answer changed or was removed;
stale: newer chunks fit it better; asked: a user asked it, and it needs a new answer; predicted: it is expected to be asked;
prefilled: predicted, and its KV is computed.
"""


@dataclass(frozen=True, slots=True)
class AnswerProvenance:
    """What an answer was made from.

    Attributes:
        versions: versions of the documents whose chunks were retrieved.
        chunks: names of the retrieved chunks in the index, best first.
        epoch: epoch of the document list, read before the retrieval.
    """

    versions: frozenset[str]
    chunks: tuple[str, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer in the cache.

    Attributes:
        id: its row.
        question: the question it was computed for.
        vector: that question's vector, (dimensions,).
        options: the options it was computed under.
        similarity: cosine between that question and the one asked, -1..1.
        text: the answer.
        sources: chunks that were in the prompt.
        chunks: names of the retrieved chunks.
        epoch: latest epoch of the document list in which these chunks were the best ones.
        made_at_s: seconds since 1970.
        errors: words in lower case that were taken for typing errors; see `Comparison.errors`.
    """

    id: int
    question: str
    vector: Vector
    options: AskOptions
    similarity: float
    text: str
    sources: tuple[Source, ...]
    chunks: tuple[str, ...]
    epoch: int
    made_at_s: float
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A question without a usable answer; answering it under `options` removes it from the pending ones.

    `since_s` is seconds since 1970.
    """

    question: str
    options: AskOptions
    reason: PendingReason
    since_s: float


@dataclass(frozen=True, slots=True)
class AnswerCacheTotals:
    """Counts: questions, those with an answer, those waiting for one, answers given from the cache; and sizes."""

    questions: int
    answered: int
    waiting: int
    given: int
    bytes: int
    limit_bytes: int
