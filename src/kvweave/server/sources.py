"""Sources of documents as clients see them."""

from pathlib import Path
from typing import Final

from kvweave.documents.file_types import MAILS, content_suffix

UPLOADS_FOLDER: Final = "uploads"
"""The folder in a tenant's home that holds the uploaded files of each knowledge base."""


def shown(source: str) -> str:
    """Return the source as clients see it: of an uploaded file, only its name."""
    path = Path(source)
    outer = path
    for parent in path.parents:  # an attachment inside a mail
        if content_suffix(parent.name) in MAILS:
            outer = parent
    return str(path.relative_to(outer.parent)) if outer.parent.parent.name == UPLOADS_FOLDER else source
