"""Entries on their way from the shared tier: each is fetched once for all who want it, and kept once it is whole.

An entry can be used as soon as its beginning has come. The rest comes in the background, a piece of one entry and then one of
the next, so that the layers of all of them come in their order, for as long as a request wants it: one whose lease lasts. Then
it is kept, if it is worth that. An entry that did not come to its end, or not as it was stored, is fetched whole by whoever
asks from then on, until it has come so, and is found or not like any other: so starting anew comes to an end.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvweave.errors import DamagedEntry
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.loading import AbandonedError, Load, Loader, Name, Wanted
from kvweave.kvstore.tiers.replication import Fetched, ReplicatedTier


@dataclass(slots=True)
class _Entry:
    """What is on its way, and whether anybody still wants it. `attempt` tells it from others under the same key."""

    fetched: Fetched
    wanted: Wanted
    attempt: object


class Fetches:
    """Fetches from one shared tier; safe to use from several threads.

    Args:
        shared: the tier.
        held: what memory has of an entry that nobody lists, so that it need not be fetched again.
        keep: called in the background with an entry of which everything has come, layers not necessarily verified.
    """

    def __init__(
        self,
        shared: ReplicatedTier,
        held: Callable[[str], Fetched | None],
        keep: Callable[[Fetched], None],
    ) -> None:
        self._shared = shared
        self._held = held
        self._keep = keep
        self._loader: Loader[Fetched | None] = Loader()
        self._arriving: dict[str, _Entry] = {}
        self._broken_off: set[str] = set()
        self._guard = threading.Lock()

    @property
    def answers(self) -> bool:
        """Whether the tier is to be asked at all: not while it rests from a failure."""
        return not self._shared.tier.resting

    def ahead(self, key: EntryKey, lease: Lease, *, here: bool = False) -> None:
        """Begin to fetch an entry, for as long as the lease lasts; as `Loader.start`."""
        lease.on_close(partial(self._loader.cancel, [self._load(key, here, whole=False)]))

    def get(
        self, keys: Sequence[EntryKey], lease: Lease | None, *, here: bool = False
    ) -> list[Fetched | None]:
        """Entries, as far as they are there: large KV when it has begun to come, and without a lease whole and verified."""
        if lease is None:
            return self._all_whole(keys, here)
        holds = [self._load(key, here, whole=False) for key in keys]
        try:
            found = self._loader.wait([self._load(key, here, whole=False) for key in keys])
        except BaseException:
            self._loader.cancel(holds)
            raise
        for hold, fetched in zip(holds, found, strict=True):
            if fetched is None or fetched.whole:  # others had better ask again
                self._loader.cancel([hold])
            else:
                lease.on_close(partial(self._loader.cancel, [hold]))
        return found

    def close(self) -> None:
        """Ask for nothing more, and wait for what is being read and until what has come is kept."""
        with self._guard:
            self._arriving = {key: entry for key, entry in self._arriving.items() if entry.fetched.whole}
        self._loader.close()
        with self._guard:
            self._arriving.clear()

    def _all_whole(self, keys: Sequence[EntryKey], here: bool) -> list[Fetched | None]:
        """Entries with every layer there and verified; they are wanted until then."""
        holds = [self._load(key, here, whole=True) for key in keys]
        try:
            found = self._loader.wait([self._load(key, here, whole=True) for key in keys])
            return list(map(self._whole, keys, found))
        finally:
            self._loader.cancel(holds)

    def _whole(self, key: EntryKey, fetched: Fetched | None) -> Fetched | None:
        """The same with every layer there and verified; another request may have begun with fewer."""
        while fetched is not None:
            try:
                verify_content(fetched.stored.content)
                break
            except DamagedEntry:
                (fetched,) = self._loader.wait([self._load(key, here=True, whole=True)])
        return fetched

    def _load(self, key: EntryKey, here: bool, whole: bool) -> Load[Fetched | None]:
        return self._loader.start(_name(key.digest), partial(self._fetched, key, whole), here=here)

    def _fetched(self, key: EntryKey, whole: bool, wanted: Wanted) -> Fetched | None:
        if not wanted():
            raise AbandonedError
        fetched = self._wanted_again(key.digest, wanted)
        if fetched is None:
            attempt = object()
            fetched = self._held(key.digest) or self._asked_for(key, whole, attempt)
            if fetched is not None and wanted():  # what nobody wants any more is not kept either
                with self._guard:
                    self._arriving[key.digest] = _Entry(fetched, wanted, attempt)
                self._loader.later(partial(self._go_on, key.digest, attempt))
        return fetched

    def _wanted_again(self, key: str, wanted: Wanted) -> Fetched | None:
        with self._guard:
            entry = self._arriving.get(key)
            if entry is None:
                return None
            entry.wanted = wanted
            return entry.fetched

    def _asked_for(self, key: EntryKey, whole: bool, attempt: object) -> Fetched | None:
        with self._guard:
            whole = whole or key.digest in self._broken_off
        fetched = self._shared.fetch(key, partial(self._break_off, key.digest, attempt), whole=whole)
        if fetched is not None and fetched.whole:
            with self._guard:
                self._broken_off.discard(key.digest)
        return fetched

    def _break_off(self, key: str, attempt: object) -> None:
        """Nobody who asks from now on gets what has come of this."""
        with self._guard:
            self._broken_off.add(key)
        self._leave(key, attempt)
        self._loader.renew(_name(key))

    def _go_on(self, key: str, attempt: object) -> None:
        """Have the next piece of an entry; when it is whole, keep it."""
        fetched = self._still_wanted(key, attempt)
        if fetched is None:
            return
        more = False
        try:
            more = fetched.rest is not None and not fetched.rest.advance()
            if not more:
                self._keep(fetched)
        except DamagedEntry:
            pass  # it is broken off, and whoever needs it finds out
        finally:
            if more:
                self._loader.later(partial(self._go_on, key, attempt))
            else:
                self._leave(key, attempt)

    def _still_wanted(self, key: str, attempt: object) -> Fetched | None:
        """An entry that is not broken off, if it is whole or wanted; one that is neither is left."""
        with self._guard:
            entry = self._arriving.get(key)
            if entry is None or entry.attempt is not attempt:
                return None
            if entry.fetched.whole or entry.wanted():
                return entry.fetched
            del self._arriving[key]
        return None

    def _leave(self, key: str, attempt: object) -> None:
        with self._guard:
            if key in self._arriving and self._arriving[key].attempt is attempt:
                del self._arriving[key]


def _name(key: str) -> Name:
    return "shared", key
