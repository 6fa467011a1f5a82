"""Texts without an answer: the passages that retrieval finds, and why, and a whole document. Loads no language model."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvweave.results import FoundPassage, Source

if TYPE_CHECKING:
    from kvweave.index.search import FoundChunk


def explained(
    question: str, found: "Sequence[FoundChunk]", sources: Sequence[Source]
) -> tuple[FoundPassage, ...]:
    """Return found chunks, whose sources are given in the same order, with the reason why each was found."""
    from kvweave.index.words import shared_words

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
        for source, each in zip(sources, found, strict=True)
    )


def text_of_passages(passages: Iterable[tuple[int, str]]) -> str:
    """Return the text that has each passage at its offset; `passages` in reading order, they may overlap."""
    text = ""
    for start, passage in passages:
        text = text[:start] + "\n" * (start - len(text)) + passage + text[start + len(passage) :]
    return text
