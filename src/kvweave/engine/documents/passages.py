"""Texts without an answer: the passages that retrieval finds, and why, and a whole document. Loads no language model."""

from collections.abc import Iterable

from kvweave.engine.answering.kb_question import sources_of
from kvweave.engine.knowledge_base import KnowledgeBase
from kvweave.errors import PathNotFound
from kvweave.results import FoundPassage, Source


def passages(base: KnowledgeBase, question: str, top_k: int | None = None) -> tuple[Source, ...]:
    """Return the chunks that a question would be answered from, best first; raises as `KnowledgeBase.prompt` does."""
    return sources_of(base._state.documents, base._asker.ranked(question, top_k))


def explained_passages(
    base: KnowledgeBase, question: str, top_k: int | None = None
) -> tuple[FoundPassage, ...]:
    """Return the same with the reason why each was found; raises as `KnowledgeBase.prompt` does."""
    from kvweave.index.words import shared_words

    found = base._asker.ranked(question, top_k)
    return tuple(
        FoundPassage(
            source=source,
            word_rank=each.reason.word_rank,
            bm25=each.reason.bm25,
            words=shared_words(question, each.text),
            vector_rank=each.reason.vector_rank,
            cosine=each.reason.cosine,
            all_words=each.reason.all_words,
            quotes=each.reason.quotes,
            rerank_score=each.reason.rerank_score,
            lacks_vector=each.reason.lacks_vector,
        )
        for source, each in zip(sources_of(base._state.documents, found), found, strict=True)
    )


def document_text(base: KnowledgeBase, source: str) -> str:
    """Return the text of a document as it was indexed; what no chunk covers, such as blank lines, comes back as line ends.

    Raises PathNotFound if the knowledge base lists no such document.
    """
    version = next((each.version for each in base.documents() if each.source == source), None)
    if version is None:
        raise PathNotFound(f"no document of knowledge base {base.name!r} is called {source!r}")
    return text_of_passages(base._components.index.passages(version))


def text_of_passages(passages: Iterable[tuple[int, str]]) -> str:
    """Return the text that has each passage at its offset; `passages` in reading order, they may overlap."""
    text = ""
    for start, passage in passages:
        text = text[:start] + "\n" * (start - len(text)) + passage + text[start + len(passage) :]
    return text
