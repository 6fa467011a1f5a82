"""The text of a whole document, put together from its chunks: what a source's offsets point into."""

from collections.abc import Iterable

from kvweave.engine.knowledge_base import KnowledgeBase
from kvweave.errors import PathNotFound


def document_text(base: KnowledgeBase, source: str) -> str:
    """Return the text of a document as it was indexed; what no chunk covers, such as blank lines, comes back as line ends.

    Raises PathNotFound if the knowledge base lists no such document.
    """
    version = next((each.version for each in base.documents() if each.source == source), None)
    if version is None:
        raise PathNotFound(f"no document of knowledge base {base.name!r} is called {source!r}")
    return joined(base._components.index.passages(version))


def joined(passages: Iterable[tuple[int, str]]) -> str:
    """Return the text that has each passage at its offset; `passages` in reading order, they may overlap."""
    text = ""
    for start, passage in passages:
        text = text[:start] + "\n" * (start - len(text)) + passage + text[start + len(passage) :]
    return text
