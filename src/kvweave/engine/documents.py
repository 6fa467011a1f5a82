"""The documents of a knowledge base: listed, looked after and taken out. Loads no model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.engine.identity import Identity
from kvweave.engine.lazy_parts import LazyParts
from kvweave.engine.records import SWEEP_GRACE_S, Records
from kvweave.errors import PathNotFound
from kvweave.knowledge.shelf import ListedDocument


@dataclass(frozen=True, slots=True)
class Documents:
    """What `records` lists in the knowledge base `name`; of `parts`, the index is used where there is one."""

    name: str
    records: Records
    identity: Identity
    parts: LazyParts

    def listed(self) -> list[ListedDocument]:
        """What is indexed, by source."""
        return self.records.shelf.list()

    def lost(self) -> list[str]:
        """Listed documents whose chunks the index no longer holds."""
        if not self.records.shelf.visible():
            return []
        rows = self.parts.bank.rows_by_version()
        return [d.source for d in self.listed() if rows.get(d.version, 0) < d.chunks]

    def remove(self, places: Sequence[Path]) -> list[str]:
        """Take out documents, or all under a folder; returns their sources. Raises as `KnowledgeBase.remove`."""
        sources: dict[str, None] = {}
        for place in places:
            sources.update(dict.fromkeys(self._at(place)))
        began_s = time.time()
        versions = [version for version in map(self.records.remove, sources) if version]
        if versions and self.identity.get("dimensions"):
            self.parts.bank.delete(versions, before_s=began_s)
            self.parts.bank.sweep(self.records.shelf.visible(), SWEEP_GRACE_S)
        self.records.empty_conversations()
        return [*sources]

    def remove_all(self) -> list[str]:
        """Take out everything, and forget what the knowledge base was made with.

        What another process lists from the moment of the commit on stays whole.
        """
        with self.records.database.transaction():
            removed = [document.source for document in self.listed()]
            for source in removed:
                self.records.remove(source)
            self.records.answers.clear()
            self.records.outlook.clear()
            self.identity.clear()
            self.records.store.clear()
        self.parts.forget()
        self.records.empty_conversations()
        return removed

    def _at(self, place: Path) -> list[str]:
        """The sources of a document, or of all under a folder."""
        shelf = self.records.shelf
        found = [str(place)] if shelf.get(str(place)) else shelf.sources_under(place)
        if not found:
            raise PathNotFound(
                f"nothing in knowledge base {self.name!r} comes from {place}; `kvweave ls` lists it"
            )
        return found
