"""What a server has acknowledged about documents, and whether its knowledge bases have it after a crash."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Discrepancies:
    """Documents that should be there and are not, and the reverse; each as "knowledge base/document"."""

    lost: tuple[str, ...]
    back: tuple[str, ...]


class Ledger:
    """The documents of each knowledge base by what the server said last. A request under way leaves its document open."""

    def __init__(self) -> None:
        self._present: dict[str, set[str]] = defaultdict(set)
        self._deleted: dict[str, set[str]] = defaultdict(set)

    def changing(self, base: str, name: str) -> None:
        """A request about this document has been sent: from now on it may be there or not."""
        self._present[base].discard(name)
        self._deleted[base].discard(name)

    def added(self, base: str, name: str) -> None:
        """The server acknowledged the upload."""
        self._present[base].add(name)

    def deleted(self, base: str, name: str) -> None:
        """The server acknowledged the deletion."""
        self._deleted[base].add(name)

    @property
    def bases(self) -> list[str]:
        """The knowledge bases about which something was acknowledged."""
        return sorted({*self._present, *self._deleted})

    def compare(self, listed: Mapping[str, Iterable[str]]) -> Discrepancies:
        """Compare with the documents that a server lists, by the last part of their paths."""
        names = {base: {source.rpartition("/")[2] for source in sources} for base, sources in listed.items()}
        lost = (
            f"{base}/{name}" for base, own in self._present.items() for name in own - names.get(base, set())
        )
        back = (
            f"{base}/{name}" for base, own in self._deleted.items() for name in own & names.get(base, set())
        )
        return Discrepancies(tuple(sorted(lost)), tuple(sorted(back)))
