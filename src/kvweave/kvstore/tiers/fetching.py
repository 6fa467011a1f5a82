"""Fetches entries from the shared tier: each once for all requests that want it, and stored here once it is whole.

An entry can be used as soon as its beginning has arrived. The rest is read in the background, while the lease of a request that
wants it lasts. The entries take turns, one piece each, so that the layers of all of them arrive in order. A complete entry is
stored, if it is worth that. If reading an entry was aborted, by a failure or by a damaged layer, the next request fetches it whole.
A whole entry is found or missed like any other, so retrying ends.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvweave.errors import DamagedEntry
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.loading import AbandonedError, IsWanted, Load, Loader
from kvweave.kvstore.tiers.remote_reader import FetchedEntry, RemoteReader


@dataclass(slots=True)
class _Fetch:
    """An entry that is being read or stored, and whether a request still wants it. `attempt` identifies this fetch of its key."""

    fetched: FetchedEntry
    is_wanted: IsWanted
    attempt: object


class Fetcher:
    """Fetches from one shared tier; safe to use from several threads.

    Args:
        reader: reads the tier's entries.
        held: returns an entry that this machine holds in memory alone, so that it need not be fetched again.
        store: called in the background with an entry that has been read completely; its layers may not be verified yet.

    Attributes:
        loader: runs the fetches.
    """

    def __init__(
        self,
        reader: RemoteReader,
        held: Callable[[str], FetchedEntry | None],
        store: Callable[[FetchedEntry], None],
    ) -> None:
        self._reader = reader
        self._held = held
        self.store = store
        self.loader: Loader[FetchedEntry | None] = Loader()
        self._fetches: dict[str, _Fetch] = {}
        self._aborted: set[str] = set()
        self._guard = threading.Lock()

    @property
    def pending(self) -> int:
        return len(self._fetches)

    def prefetch(self, key: EntryKey, lease: Lease, *, inline: bool = False) -> None:
        """Begin to fetch an entry, for as long as the lease lasts; `inline` as in `Loader.start`."""
        lease.on_close(partial(self.loader.cancel, [self._load(key, inline, whole=False)]))

    def get(
        self, keys: Sequence[EntryKey], lease: Lease | None, *, inline: bool = False
    ) -> list[FetchedEntry | None]:
        """Return each entry that is there: large KV from its beginning on; without a lease whole and verified."""
        if lease is None:
            return self._get_whole(keys, inline)
        holds = [self._load(key, inline, whole=False) for key in keys]
        try:
            found = self.loader.wait([self._load(key, inline, whole=False) for key in keys])
        except BaseException:
            self.loader.cancel(holds)
            raise
        for hold, fetched in zip(holds, found, strict=True):
            if fetched is None or fetched.whole:  # other requests should ask the tier again
                self.loader.cancel([hold])
            else:
                lease.on_close(partial(self.loader.cancel, [hold]))
        return found

    def close(self) -> None:
        """Start nothing more; wait until active reads have ended and whole entries are stored."""
        with self._guard:
            self._fetches = {key: fetch for key, fetch in self._fetches.items() if fetch.fetched.whole}
        self.loader.close()
        with self._guard:
            self._fetches.clear()

    def _get_whole(self, keys: Sequence[EntryKey], inline: bool) -> list[FetchedEntry | None]:
        """Return entries with every layer read and verified; they are wanted until then."""
        holds = [self._load(key, inline, whole=True) for key in keys]
        try:
            found = self.loader.wait([self._load(key, inline, whole=True) for key in keys])
            return list(map(self._completed, keys, found))
        finally:
            self.loader.cancel(holds)

    def _completed(self, key: EntryKey, fetched: FetchedEntry | None) -> FetchedEntry | None:
        """Read and verify the remaining layers: another request may have begun the fetch without them."""
        while fetched is not None:
            try:
                verify_content(fetched.parsed.content)
                break
            except DamagedEntry:
                (fetched,) = self.loader.wait([self._load(key, inline=True, whole=True)])
        return fetched

    def _load(self, key: EntryKey, inline: bool, whole: bool) -> Load[FetchedEntry | None]:
        return self.loader.start(key.digest, partial(self._fetch, key, whole), inline=inline)

    def _fetch(self, key: EntryKey, whole: bool, is_wanted: IsWanted) -> FetchedEntry | None:
        """Return an entry from an active fetch, from memory or from the tier, and have its rest read in the background."""
        if not is_wanted():
            raise AbandonedError
        fetched = self._join(key.digest, is_wanted)
        if fetched is None:
            attempt = object()
            fetched = self._held(key.digest) or self._fetch_from_tier(key, whole, attempt)
            # An entry that no request wants any more is not stored either.
            if fetched is not None and is_wanted():
                with self._guard:
                    self._fetches[key.digest] = _Fetch(fetched, is_wanted, attempt)
                self.loader.run_later(partial(self._continue, key.digest, attempt))
        return fetched

    def _join(self, key: str, is_wanted: IsWanted) -> FetchedEntry | None:
        """Return the entry of an active fetch, which from now on lasts while `is_wanted` holds."""
        with self._guard:
            fetch = self._fetches.get(key)
            if fetch is None:
                return None
            fetch.is_wanted = is_wanted
            return fetch.fetched

    def _fetch_from_tier(self, key: EntryKey, whole: bool, attempt: object) -> FetchedEntry | None:
        with self._guard:
            whole = whole or key.digest in self._aborted
        fetched = self._reader.fetch(key, partial(self._abort, key.digest, attempt), whole=whole)
        if fetched is not None and fetched.whole:
            with self._guard:
                self._aborted.discard(key.digest)
        return fetched

    def _abort(self, key: str, attempt: object) -> None:
        """End a fetch that failed: later requests must not get what it has read."""
        with self._guard:
            self._aborted.add(key)
        self._end(key, attempt)
        self.loader.discard_result(key)

    def _continue(self, key: str, attempt: object) -> None:
        """Read the next piece of an entry, or store the entry when it is whole."""
        fetched = self._active(key, attempt)
        if fetched is None:
            return
        more = False
        try:
            more = fetched.rest is not None and not fetched.rest.advance()
            if not more:
                self.store(fetched)
        except DamagedEntry:
            pass  # the fetch is aborted, and a request that needs the layer learns of it
        finally:
            if more:
                self.loader.run_later(partial(self._continue, key, attempt))
            else:
                self._end(key, attempt)

    def _active(self, key: str, attempt: object) -> FetchedEntry | None:
        """Return the entry of this fetch, unless it was aborted; end the fetch if it is neither whole nor wanted."""
        with self._guard:
            fetch = self._fetches.get(key)
            if fetch is None or fetch.attempt is not attempt:
                return None
            if fetch.fetched.whole or fetch.is_wanted():
                return fetch.fetched
            del self._fetches[key]
        return None

    def _end(self, key: str, attempt: object) -> None:
        with self._guard:
            if key in self._fetches and self._fetches[key].attempt is attempt:
                del self._fetches[key]
