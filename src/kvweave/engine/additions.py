"""Documents on their way into a knowledge base: what indexes them is made of parts that agree with what is settled."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.config import DEFAULT_CHUNK_TOKENS, within_context
from kvweave.core import AddReport
from kvweave.engine.choices import Choices
from kvweave.engine.indexing import Indexer
from kvweave.engine.lazy_parts import LazyParts
from kvweave.engine.records import Progress, Records
from kvweave.engine.terms import Terms
from kvweave.errors import InvalidRequest
from kvweave.knowledge.chunking import Chunker
from kvweave.models.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Additions:
    """Adds documents to what `records` lists; nothing under `own_folder`, where kvweave keeps its own, is one."""

    records: Records
    parts: LazyParts
    choices: Choices
    terms: Terms
    own_folder: Path

    def add(self, places: Sequence[Path], progress: Progress) -> AddReport:
        """Index files and folders; raises as `KnowledgeBase.add`."""
        indexer = self.indexer()
        report = indexer.add(places, progress, settle=lambda: self.settle(indexer))
        if report.changed or report.removed:
            self.records.empty_conversations()
        return report

    def missing_kv(self) -> int:
        """How many chunks lack what the recipe prepares."""
        return self.indexer().missing_kv() if self.records.shelf.visible() else 0

    def indexer(self) -> Indexer:
        """What adds documents. Settles nothing by itself; raises KnowledgeBaseMismatch and InvalidRequest."""
        recipe, adapter, system = self.choices.recipe(), self.parts.adapter, self.terms.system
        chunker = self._chunker(adapter, system)
        bank, encoder = self.parts.bank, self.parts.encoder
        return Indexer(self.records, bank, encoder, adapter, chunker, recipe, system, self.own_folder)

    def settle(self, indexer: Indexer) -> None:
        """Write down what documents are made with by this indexer; raises KnowledgeBaseMismatch, as another was faster."""
        encoder = self.parts.encoder
        facts = {
            "embedding": encoder.name,
            "dimensions": str(encoder.dimensions),
            "system": indexer.system,
            "chunk_tokens": str(indexer.chunker.chunk_tokens),
            "overlap_tokens": str(indexer.chunker.overlap_tokens),
        }
        self.terms.settle(self.parts.adapter.fingerprint, facts)

    def _chunker(self, adapter: Adapter, system: str) -> Chunker:
        """Cuts so that several chunks fit behind the instruction."""
        context_tokens = adapter.geometry.context_tokens
        chunk_tokens = self.terms.chunk_tokens(within_context(None, DEFAULT_CHUNK_TOKENS, context_tokens))
        overlap_tokens = self.terms.overlap_tokens
        around = len(adapter.template.prefix_ids(system)) + len(adapter.template.framed(()))
        room = context_tokens - around - 1  # a question has one token at least
        if chunk_tokens > room:
            raise InvalidRequest(
                f"chunk_tokens is {chunk_tokens}, but behind the instruction {adapter.fingerprint.name} has room for "
                f"{room}; use less, since several chunks and a question must fit together"
            )
        return Chunker(adapter.tokenizer, chunk_tokens, overlap_tokens)
