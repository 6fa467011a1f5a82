"""Passages for a question, without an answer: what retrieval alone finds."""

from kvweave.engine.kb_question import sources_of
from kvweave.engine.knowledge_base import KnowledgeBase
from kvweave.results import Source


def passages(base: KnowledgeBase, question: str, top_k: int | None = None) -> tuple[Source, ...]:
    """Return the chunks that a question would be answered from, best first; raises as `KnowledgeBase.prompt` does."""
    found = base._asker.found(question, top_k)
    ranked = sorted(found, key=lambda chunk: -chunk.score)  # stable: equal scores stay in reading order
    return sources_of(base._state.documents, ranked)
