"""Writes the vectors that listed chunks lack, in batches: each is searched by at once, and stays when the work is interrupted.

A killed run leaves at most one batch whose vectors are written and not yet noted; the next run notes them.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvweave.embedding import MANY_WINDOWS
from kvweave.machine import has_fast_matmul
from kvweave.state.components import Components
from kvweave.state.knowledge_base_state import SWEEP_GRACE_S, KnowledgeBaseState, Progress
from kvweave.state.metadata import KBMetadata
from kvweave.state.preparation import Preparation

if TYPE_CHECKING:
    from kvweave.state.active_requests import RequestGuard

_BATCH_CHUNKS: Final = 16
"""Chunks that are embedded at once. A question to the same process waits for them: they take a second or two at most."""
_STAGE: Final = "embedding"


@dataclass(frozen=True, slots=True)
class MissingVectors:
    """The vectors that the chunks of a knowledge base lack."""

    state: KnowledgeBaseState
    components: Components
    metadata: KBMetadata
    preparation: Preparation

    @property
    def count(self) -> int:
        """How many chunks have none yet."""
        return self.state.documents.without_vector_count()

    def write(self, progress: Progress, guard: "RequestGuard | None" = None) -> int:
        """Write them all, yielding to requests between two batches; return how many were written.

        Raises ModelNotFound, KnowledgeBaseMismatch, StoreError, and BackgroundStopped as the guard does.
        """
        documents, written, most = self.state.documents, 0, _batch_chunks()
        while batch := documents.without_vector(most):
            if guard is not None:
                guard.yield_to_requests()
            progress(_STAGE, written, written + self.count)
            self.components.encoder.load()  # no part of the rate
            began = time.perf_counter()
            done = self._write(list(batch.values()))
            self.state.have_vector(list(batch))
            if done:
                self.preparation.record_embedding_rate(done / (time.perf_counter() - began))
            written += done
        if written:
            self.components.index.sweep(documents.visible_versions(), SWEEP_GRACE_S)
            progress(_STAGE, written, written)
        return written

    def _write(self, row_ids: list[str]) -> int:
        """Write the vectors of rows; those that are there, or whose document is lost or removed, are passed over."""
        index, encoder = self.components.index, self.components.encoder
        self.metadata.check("embedding", encoder.name)  # it may have been emptied and filled with another one
        texts = index.without_vector(row_ids)
        if texts:
            index.write_vectors(list(texts), encoder.encode(list(texts.values())))
        return len(texts)


def _batch_chunks() -> int:
    """Return how many chunks are embedded at once: more where so many are computed in bfloat16, which is faster by far."""
    return MANY_WINDOWS if has_fast_matmul(torch.device("cpu"), torch.bfloat16) else _BATCH_CHUNKS
