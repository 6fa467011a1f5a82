"""Paths that users name, as the knowledge base records them."""

from collections.abc import Sequence
from pathlib import Path

from kvweave.errors import InvalidRequest, PathNotFound
from kvweave.index.documents import DocumentTable


def absolute(path: str | Path) -> Path:
    """Return a path as absolute; raises InvalidRequest for an empty one, which would mean the working folder."""
    if not str(path):
        raise InvalidRequest("a path is empty; name a file or folder ('.' for this one)")
    return Path(path).expanduser().absolute()


def existing_paths(paths: Sequence[str | Path]) -> list[Path]:
    """Return paths to add; raises PathNotFound for one that does not exist, InvalidRequest if there are none."""
    if not paths:
        raise InvalidRequest("no paths to add")
    found = [absolute(path) for path in paths]
    for path in found:
        if not path.exists():
            raise PathNotFound(f"{path} does not exist")
    return found


def sources_from(kb: str, documents: DocumentTable, path: str | Path) -> list[str]:
    """Return the sources of a knowledge base's document with its attachments, or of all its documents under a folder.

    Raises PathNotFound if nothing is indexed from the path.
    """
    place = absolute(path)
    found = documents.sources_under(place)  # of a file too: attachments are under their e-mail
    if not found:
        raise PathNotFound(f"nothing in knowledge base {kb!r} comes from {place}; `kvweave ls` lists it")
    return found
