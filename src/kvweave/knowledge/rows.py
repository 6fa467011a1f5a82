"""What the bank's table holds, and the values that go in and come out.

The one place that knows the columns.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kvweave.core import Chunk
from kvweave.knowledge.shelf import document_id, row_id

FOUND_COLUMNS = ["version", "source", "position", "start", "end", "digest", "text"]


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk that a search found.

    `version` is its document's, `start`/`end` are character offsets into the document's text. `score` is the fused
    rank score: higher is better, comparable only within one search.
    """

    version: str
    source: str
    position: int
    start: int
    end: int
    text: str
    score: float


def table_schema(dimensions: int) -> pa.Schema:
    """The Arrow schema for vectors of this length."""
    return pa.schema(
        [
            pa.field("row_id", pa.string(), nullable=False),
            pa.field("version", pa.string(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),
            pa.field("start", pa.int64(), nullable=False),
            pa.field("end", pa.int64(), nullable=False),
            pa.field("digest", pa.string(), nullable=False),
            pa.field("text", pa.string(), nullable=False),
            pa.field("written_s", pa.float64(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), dimensions), nullable=False),
        ]
    )


def versions_and_positions(chunks: Iterable[Chunk]) -> list[tuple[str, int]]:
    """Each chunk's document version and its number there: chunks of one document come in reading order."""
    counts: Counter[str] = Counter()
    places = []
    for chunk in chunks:
        version = document_id(chunk.document, chunk.document_digest)
        places.append((version, counts[version]))
        counts[version] += 1
    return places


def arrow_table(
    chunks: Sequence[Chunk], vectors: npt.NDArray[np.float32], written_s: float, schema: pa.Schema
) -> pa.Table:
    """An Arrow table of the chunks; vectors has shape (chunks, dimensions), `written_s` is now since the epoch."""
    places = versions_and_positions(chunks)
    flat = pa.array(np.ascontiguousarray(vectors, dtype=np.float32).ravel())
    columns = {
        "row_id": [row_id(version, position) for version, position in places],
        "version": [version for version, _ in places],
        "source": [chunk.document for chunk in chunks],
        "position": [position for _, position in places],
        "start": [chunk.start for chunk in chunks],
        "end": [chunk.end for chunk in chunks],
        "digest": [chunk.digest for chunk in chunks],
        "text": [chunk.text for chunk in chunks],
        "written_s": [written_s] * len(chunks),
        "vector": pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
    }
    return pa.table(columns, schema=schema)
