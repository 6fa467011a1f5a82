"""The shared tier as one machine uses it: fetching entries, and keeping the tier in step with the catalogue.

What is new here is published, what was removed here is deleted there, the cap is held, all by errands that the catalogue
remembers (`shared_catalog.py`). Several machines may do so at once: an entry's key says everything that it depends on, so
whoever comes first serves all. Where each of them holds the cap for itself, together they exceed it by at most what the
others put between two listings.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kvweave.errors import DamagedEntry, StoreError, StoreTooNew
from kvweave.kvstore.eviction import choose_victims
from kvweave.kvstore.format import LayerPlaces, ParsedEntry, layer_places, parse_entry, verify_content
from kvweave.kvstore.keys import EntryKey
from kvweave.kvstore.reports import VerifyReport
from kvweave.kvstore.shared_catalog import Publishable, SharedCatalog
from kvweave.kvstore.tiers.circuit_breaker import CircuitBreaker
from kvweave.kvstore.tiers.streaming import PIECE_BYTES, Bandwidth, StreamingEntry, pieces
from kvweave.kvstore.tiers.tier import Blob, Range, owned_copy

_LOG = logging.getLogger(__name__)

LIST_EVERY_S = 600.0
BATCH = 16  # errands between two looks at what is to be done


@dataclass(frozen=True, slots=True)
class Fetched:
    """An entry, and its bytes (n,) uint8, of which its tensors are views.

    All of them are there and verified where there is no `rest`; else layers are, as KV read from a file, when they are used.
    """

    stored: ParsedEntry
    data: Tensor
    rest: StreamingEntry | None = None

    @property
    def whole(self) -> bool:
        """Whether all of it is there by now."""
        return self.rest is None or self.rest.whole


class ReplicatedTier:
    """One namespace's entries in the tier.

    Args:
        namespace: whose entries.
        tier: where they are.
        rows: what the catalogue knows of them.
        read_here: gives the bytes of an entry that is new here, by its key; None if it is gone by now.
        limit_bytes: the cap.
        in_use: keys of what may not be evicted.
        now_s: the catalogue's clock.
        on_damage: told of every damaged entry.
        clock: seconds from any beginning, for the time between two listings.
    """

    def __init__(
        self,
        namespace: str,
        tier: CircuitBreaker,
        rows: SharedCatalog,
        read_here: Callable[[str], Blob | None],
        *,
        limit_bytes: Callable[[], int],
        in_use: Callable[[], Collection[str]],
        now_s: Callable[[], float],
        on_damage: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace = namespace
        self.tier = tier
        self.rows = rows
        self._read_here = read_here
        self._limit_bytes = limit_bytes
        self._in_use = in_use
        self._now_s = now_s
        self._on_damage = on_damage
        self._clock = clock
        self._pace = Bandwidth()
        self._listed_at: float | None = None
        self._taken = 0  # how often the tier took something
        self._refused: dict[str, int] = {}  # what it did not take, and how much it had taken before
        rows.settle(namespace, tier.place)
        rows.recover(namespace, now_s())

    # Reading

    def fetch(self, key: EntryKey, broken_off: Callable[[], object], *, whole: bool) -> Fetched | None:
        """An entry, if it is there: what is small, or no KV, all of it and verified; of large KV the beginning.

        What is found damaged by now is deleted, counted and logged.

        Args:
            key: which one.
            broken_off: called before DamagedEntry is raised later on over a layer that is not what was stored, or cannot be
                had. Nothing else is done about it: another machine may have replaced the entry meanwhile, or the place not
                answer. To fetch it whole tells.
            whole: have all of it now.
        """
        try:
            if whole or key.content != "kv":
                return self._whole(key.digest)
            return self._begun(key.digest, broken_off)
        except DamagedEntry as error:
            self.drop_damaged(key.digest, error)
        except StoreTooNew as error:
            _LOG.warning("shared entry not used: %s", error)
        return None

    def _whole(self, key: str) -> Fetched | None:
        data = self.tier.get_many([key]).get(key)
        return None if data is None else self.verified(key, data)

    def _begun(self, key: str, broken_off: Callable[[], object]) -> Fetched | None:
        """An entry by its first bytes, which are often all."""
        beginning = self._read(key, [(0, PIECE_BYTES)])
        if beginning is None:
            return None
        if len(beginning[0]) < PIECE_BYTES:
            return self.verified(key, beginning[0])
        first = owned_copy(beginning[0])
        places = self._places(key, first)
        if places is None or places.first > PIECE_BYTES or places.bytes <= PIECE_BYTES:
            return self._whole(key)
        try:
            data = torch.empty(places.bytes, dtype=torch.uint8)
        except (RuntimeError, TypeError):  # more than memory has, or than a number of bytes can be
            return self._whole(key)
        data[:PIECE_BYTES] = first
        read, where = partial(self._read, key), self._where(key)
        rest = StreamingEntry(data, pieces(places, PIECE_BYTES), read, self._pace, broken_off, where)
        stored = parse_entry(data, where, lambda reason: broken_off(), rest)
        return Fetched(self._named(stored, key), data, rest)

    def _places(self, key: str, beginning: Tensor) -> LayerPlaces | None:
        """None where the beginning does not tell: whether anything is wrong is then to be seen from the whole."""
        try:
            return layer_places(beginning, self._where(key))
        except DamagedEntry:
            return None

    def _read(self, key: str, ranges: Sequence[Range]) -> Sequence[Blob] | None:
        size = sum(end - begin for begin, end in ranges)
        return self._pace.timed(lambda: self.tier.get_ranges(key, ranges), size)

    def _where(self, key: str) -> str:
        return f"entry {key} in {self.tier.place}"

    def _named(self, stored: ParsedEntry, key: str) -> ParsedEntry:
        """The same if it is the entry of this key; raises DamagedEntry."""
        if stored.key.digest != key:
            raise DamagedEntry(f"{self._where(key)} is entry {stored.key.digest}")
        return stored

    def verified(self, key: str, data: Blob) -> Fetched:
        """A copy of an entry's bytes and what they hold; raises DamagedEntry and StoreTooNew."""
        copy = owned_copy(data)
        stored = self._named(parse_entry(copy, self._where(key)), key)
        verify_content(stored.content)
        return Fetched(stored, copy)

    def drop_damaged(self, key: str, error: DamagedEntry) -> None:
        """Delete an entry that cannot be used."""
        _LOG.warning("shared entry dropped: %s", error)
        self._on_damage()
        try:
            if self.tier.delete([key]):
                self.rows.remove(self.namespace, [key])
        except StoreError as busy:  # the next listing tells as well
            _LOG.debug("deleted there, and not noted here: %s", busy)

    # Keeping in step

    def work_off(self) -> bool:
        """Do some of what is to be done; whether any of it is done now."""
        deletions, additions = self._errands()
        if not (deletions or additions) or self.tier.resting or not self._list_now_and_then():
            return False
        # Asked before anything is written: so a tier that does not answer is told from one that takes nothing.
        there = self.tier.has_many([*deletions, *additions])
        if self.tier.failing:
            return False
        deleted = bool(deletions) and self._delete(deletions)
        published = bool(additions) and self._publish(additions, there)
        return deleted or published

    def reconcile(self) -> int | None:
        """Put right what is known of the tier by listing it; how many rows were wrong, None if it does not answer."""
        known_before = self.rows.known(self.namespace)
        sizes = self.tier.sizes()
        if sizes is None:
            return None
        self._listed_at = self._clock()
        self.rows.recover(self.namespace, self._now_s())
        return self.rows.reconcile(self.namespace, known_before, sizes, self._now_s())

    def make_room(self, needed_bytes: int, worth: float) -> bool:
        """Evict until so much more fits under the cap; False, and nothing is gone, if that is worth more than `worth`."""
        excess = self.rows.total(self.namespace).bytes + needed_bytes - self._limit_bytes()
        if excess <= 0:
            return True
        victims = choose_victims(
            self.rows.least_worth(self.namespace, excess, frozenset(self._in_use())), excess
        )
        if sum(row.bytes for row in victims) < excess or victims[-1].standing >= worth:
            return False
        gone = [row.key for row in victims]
        if not self.tier.delete(gone):
            return False
        self.rows.remove(self.namespace, gone)
        return True

    def verify(self, report: VerifyReport) -> VerifyReport:
        """Fetch and check every entry, one after the other, and put the rows right; adds to the report of other tiers."""
        checked, damaged = 0, []
        for key in self.tier.sizes() or ():
            data = self.tier.get_many([key]).get(key)
            if data is None:
                continue
            checked += 1
            try:
                self.verified(key, data)
            except DamagedEntry as error:
                self.drop_damaged(key, error)
                damaged.append(str(error))
            except StoreTooNew as error:
                report = replace(report, newer=(*report.newer, str(error)))
        wrong = self.reconcile()
        silent = () if wrong is not None else (f"{self.tier.place} does not answer",)
        return replace(
            report,
            shared_checked=checked,
            shared_damaged=tuple(damaged),
            shared_reconciled=wrong or 0,
            unopened=(*report.unopened, *silent),
        )

    def clear(self) -> int:
        """Delete all of the namespace's entries; returns how many, as far as the tier answers."""
        keys = list(self.tier.sizes() or ())
        if not self.tier.delete(keys):
            return 0
        self.rows.remove(self.namespace, keys)
        self.reconcile()
        return len(keys)

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()

    def _list_now_and_then(self) -> bool:
        """Whether the tier was listed lately, by now."""
        if self._listed_at is not None and self._clock() - self._listed_at < LIST_EVERY_S:
            return True
        return self.reconcile() is not None

    def _errands(self) -> tuple[list[str], list[str]]:
        """What may be tried now: to be deleted, and to be put, what was refused before last."""
        deletions, additions = list[str](), list[str]()
        if not self.tier.deleting.resting:
            deletions = self.rows.errands(self.namespace, "delete", BATCH)
        if not self.tier.putting.resting:
            most = BATCH + len(self._refused)
            additions = self.rows.errands(self.namespace, "put", most)
            if len(additions) < most:  # that is all there are: the others need not be put any more
                self._refused = {key: self._refused[key] for key in additions if key in self._refused}
            additions.sort(key=lambda key: key in self._refused)
        return deletions, additions[:BATCH]

    def _delete(self, keys: Sequence[str]) -> bool:
        if not self.tier.delete(keys):
            return False
        self.rows.deleted(self.namespace, keys)
        return True

    def _publish(self, keys: Sequence[str], there: Collection[str]) -> bool:
        """Put these, except those that are there, as long as the tier takes them; whether any is done with."""
        entries = self.rows.announce(self.namespace, keys, self._now_s())
        waiting, kept = {entry.key for entry in entries}, list[Publishable]()
        for entry in sorted(entries, key=lambda entry: entry.key in self._refused):
            outcome = "kept" if entry.key in there else self._put(entry, sum(one.bytes for one in kept))
            if outcome == "waits":
                if self.tier.resting or self.tier.putting.resting:
                    break
                continue
            waiting.remove(entry.key)
            self._refused.pop(entry.key, None)
            if outcome == "kept":
                kept.append(entry)
        done = [key for key in keys if key not in waiting]
        if done:
            self.rows.published(self.namespace, done, kept)
        return bool(done)

    def _put(self, entry: Publishable, beside_bytes: int) -> Literal["kept", "left", "waits"]:
        """Whether the tier has it now, or it is left out, or to be tried again.

        Left out is what is gone by now, what is not worth its room, and what is refused by a tier that takes others. That is
        so if it was refused before, and something else was taken since.

        `beside_bytes` were put lately and are not in the rows yet.
        """
        data = self._read_here(entry.key)
        if data is None:
            return "left"
        if not self.make_room(entry.bytes + beside_bytes, entry.standing):
            return "waits" if self.tier.failing or self.tier.deleting.failing else "left"
        if self.tier.put(entry.key, data):
            self._taken += 1
            return "kept"
        if self.tier.resting or self._refused.setdefault(entry.key, self._taken) == self._taken:
            return "waits"
        _LOG.info("an entry stays on this machine: %s takes others, and not this one", self.tier.place)
        return "left"


LOOK_AGAIN_S = 1.0


class ReplicationThread:
    """Works off the errands of `shared` in a thread that starts when it is first woken."""

    def __init__(self, shared: ReplicatedTier) -> None:
        self._shared = shared
        self._woken = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._told = False

    @property
    def pending(self) -> int:
        """How many errands wait."""
        return self._shared.rows.waiting(self._shared.namespace)

    def wake(self) -> None:
        """There is something to do."""
        self._woken.set()
        with self._guard:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._live, name="kvweave-shared", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Do what is left, unless the tier fails, and end the thread."""
        with self._guard:
            self._closing = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        self._work()

    def _live(self) -> None:
        while not self._closing:
            self._woken.wait(LOOK_AGAIN_S if self._has_failed else None)
            self._woken.clear()
            if not self._closing:
                self._work()

    @property
    def _has_failed(self) -> bool:
        """Whether something may be left that will be possible later, though nobody wakes this thread for it."""
        return self._told or self._shared.tier.failing or self._shared.tier.refusing

    def _work(self) -> None:
        try:
            while self._shared.work_off():
                pass
            self._told = False
        except (StoreError, sqlite3.Error, OSError) as error:
            if not self._told:
                _LOG.warning("the shared tier is not kept in step for now: %s", error)
            self._told = True
