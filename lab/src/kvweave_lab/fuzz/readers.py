"""The readers that `kvweave fuzz` knows."""

from collections.abc import Mapping
from typing import Final

from kvweave_lab.fuzz.campaign import Reader
from kvweave_lab.fuzz.documents import DOCUMENTS
from kvweave_lab.fuzz.entries import ENTRIES
from kvweave_lab.fuzz.models import MODELS

READERS: Final[Mapping[str, Reader]] = {**DOCUMENTS, **MODELS, "entries": ENTRIES}
