"""Values that go into the answer cache and come out of it, and the tables that hold them."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvweave.options import AskOptions
from kvweave.results import Source

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Vector = npt.NDArray[np.float32]
else:
    Vector = Any  # listing documents takes half as long without numpy

SCHEMA: Final = (
    """CREATE TABLE IF NOT EXISTS banked_questions (
        id INTEGER PRIMARY KEY AUTOINCREMENT, circumstances TEXT NOT NULL, question TEXT NOT NULL,
        reading TEXT NOT NULL, vector BLOB NOT NULL, answer TEXT, sources TEXT NOT NULL DEFAULT '[]',
        chunks TEXT NOT NULL DEFAULT '[]', epoch INTEGER NOT NULL DEFAULT 0, made_at REAL NOT NULL,
        waiting TEXT, waiting_since REAL, uses INTEGER NOT NULL DEFAULT 0, weight REAL NOT NULL DEFAULT 0,
        last_used REAL NOT NULL, bytes INTEGER NOT NULL DEFAULT 0, UNIQUE (circumstances, question))""",
    "CREATE INDEX IF NOT EXISTS banked_questions_by_reading ON banked_questions (circumstances, reading)",
    "CREATE INDEX IF NOT EXISTS banked_questions_by_weight ON banked_questions (weight, last_used, id, bytes)",
    """CREATE INDEX IF NOT EXISTS banked_questions_by_use ON banked_questions (circumstances, last_used)
         WHERE answer IS NOT NULL""",
    """CREATE INDEX IF NOT EXISTS banked_questions_by_making ON banked_questions (circumstances, made_at)
         WHERE answer IS NOT NULL""",
    "CREATE INDEX IF NOT EXISTS banked_questions_waiting ON banked_questions (waiting_since) WHERE waiting IS NOT NULL",
    """CREATE TABLE IF NOT EXISTS answers_ahead (
        question INTEGER PRIMARY KEY REFERENCES banked_questions (id) ON DELETE CASCADE, seconds REAL NOT NULL)""",
    """CREATE TABLE IF NOT EXISTS answer_versions (
        version TEXT NOT NULL, question INTEGER NOT NULL REFERENCES banked_questions (id) ON DELETE CASCADE,
        PRIMARY KEY (version, question)) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS answer_versions_by_question ON answer_versions (question)",
    """CREATE TABLE IF NOT EXISTS shared_answers (
        asked TEXT NOT NULL, stored TEXT NOT NULL, score REAL, rejected INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (asked, stored)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS promoted_answers (
        question INTEGER PRIMARY KEY REFERENCES banked_questions (id) ON DELETE CASCADE,
        stored TEXT NOT NULL, score REAL NOT NULL)""",
)
# Column names are stored: `circumstances` holds `AskOptions.cache_key`, `reading` the matcher's key, `waiting` the reason
# why a question is pending.
COLUMNS: Final = (
    "id, question, vector, circumstances, answer, sources, chunks, epoch, made_at, "
    "(SELECT stored FROM promoted_answers WHERE promoted_answers.question = id), "
    "(SELECT score FROM promoted_answers WHERE promoted_answers.question = id)"
)

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
    """An answer in the cache, with the question and options that it was computed for.

    Attributes:
        id: its row.
        vector: the question's, (dimensions,).
        similarity: cosine between that question and the one asked, -1..1.
        sources: chunks that were in the prompt.
        chunks: names of the retrieved chunks.
        epoch: latest epoch of the document list in which these chunks were the best ones.
        made_at_s: seconds since 1970.
        errors: see `Comparison.errors`.
        judged: the judge's score of both questions if they share the answer on its word, else None.
        promoted_from: the question that the answer was computed for, if it was promoted from there ahead of time, else empty.
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
    judged: float | None = None
    promoted_from: str = ""

    @property
    def stored_for(self) -> str:
        """The question that the answer was computed for."""
        return self.promoted_from or self.question


@dataclass(frozen=True, slots=True)
class PendingQuestion:
    """A question without a usable answer; answering it under `options` removes it from the pending ones."""

    question: str
    options: AskOptions
    reason: PendingReason


@dataclass(frozen=True, slots=True)
class AnswerCacheTotals:
    """Counts: questions, those with an answer, those waiting for one, answers given from the cache; and sizes.

    `judged` of the given answers were given on the judge's word, and `rejected` are answers to which users said no. `promoted` are
    questions that got the answer of another one ahead of time, and `promoted_given` are answers given from these, without a pass.
    """

    questions: int
    answered: int
    waiting: int
    given: int
    judged: int
    rejected: int
    promoted: int
    promoted_given: int
    bytes: int
    limit_bytes: int


def read_vector(blob: bytes) -> Vector:
    """Return stored vectors, one after the other: (vectors * dimensions,)."""
    import numpy as np

    vector: Vector = np.frombuffer(blob, dtype="<f4").astype(np.float32)
    return vector


def written_vector(vector: Vector) -> bytes:
    """Return a vector as it is stored."""
    import numpy as np

    return np.ascontiguousarray(vector, dtype="<f4").tobytes()


def read_answer(row: tuple[Any, ...]) -> CachedAnswer:
    """Return the answer in a row of COLUMNS."""
    id_, question, blob, key, text, sources, chunks, epoch, made_at, promoted_from, score = row
    return CachedAnswer(
        id=id_,
        question=question,
        vector=read_vector(blob),
        options=AskOptions.from_key(key),
        similarity=1.0,
        text=text,
        sources=tuple(Source(*source) for source in json.loads(sources)),
        chunks=tuple(json.loads(chunks)),
        epoch=epoch,
        made_at_s=made_at,
        judged=score,
        promoted_from=promoted_from or "",
    )
