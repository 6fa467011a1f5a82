"""One look-up: the keys of what is asked for, what the tiers have of them, and what counts as a hit or a miss.

Knows how entries are named and who has them; neither what is in them nor how they come to be.
"""

from collections.abc import Sequence

from kvweave.core import Making
from kvweave.store.format import Content
from kvweave.store.keys import ContentKind, EntryKey, digest_tokens
from kvweave.store.parts import StoreParts
from kvweave.store.tiers.lease import Lease
from kvweave.store.tiers.tiered import Asked, Got


class LookUps:
    """Look-ups in one namespace, of entries made by the model of which a digest is given."""

    def __init__(self, namespace: str, parts: StoreParts) -> None:
        self._namespace = namespace
        self._parts = parts

    def find(
        self,
        model: str,
        content: ContentKind,
        wanted: Sequence[tuple[Sequence[int], Sequence[Making]]],
        lease: Lease | None,
        *,
        whole: bool = False,
    ) -> list[tuple[Content, Making] | None]:
        """For each of these token ids the first of the makings that there is, `whole`: every layer verified; counted."""
        asked = [Asked(self._candidates(model, content, ids, makings), ids) for ids, makings in wanted]
        found = self._parts.tiers.find(asked, lease, whole=whole)
        self._count(asked, found)
        return [None if one is None else (one.content, one.key.making) for one in found]

    def adopt(
        self, model: str, content: ContentKind, wanted: Sequence[tuple[Sequence[int], Making]]
    ) -> list[bool]:
        """Bring what only the shared tier has to the disk; whether each is listed now. Not counted."""
        asked = [Asked(self._candidates(model, content, ids, [making]), ids) for ids, making in wanted]
        return self._parts.tiers.adopt_missing(asked)

    def listed(self, model: str, content: ContentKind, wanted: Sequence[tuple[str, Making]]) -> list[bool]:
        """Whether the catalogue lists each, given by the digest of its tokens, by one query. Not counted."""
        keys = [EntryKey(self._namespace, model, tokens, making, content).digest for tokens, making in wanted]
        paths = self._parts.catalog.paths(keys)
        return [key in paths for key in keys]

    def _candidates(
        self, model: str, content: ContentKind, ids: Sequence[int], makings: Sequence[Making]
    ) -> list[EntryKey]:
        tokens = digest_tokens(ids) if makings else ""
        return [EntryKey(self._namespace, model, tokens, making, content) for making in makings]

    def _count(self, asked: Sequence[Asked], found: Sequence[Got | None]) -> None:
        tallies = self._parts.tallies
        tallies.hit((one.key.digest, one.tier) for one in found if one is not None)
        tallies.add(
            "misses",
            sum(one is None for one, each in zip(found, asked, strict=True) if each.candidates),
        )
        if tallies.due:
            tallies.flush_quietly()
