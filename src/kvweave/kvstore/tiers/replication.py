"""The shared tier as one machine uses it: keeps the tier in step with the catalogue by a replication queue.

New entries of this machine are put into the tier, removed ones are deleted there, and the cap is held. The queue is in the
catalogue (`shared_catalog.py`). Several machines may do this at once: a key names everything that an entry depends on, so the
first machine to put it serves all. Each machine holds the cap for itself; together they exceed it by at most what the others
put between two listings.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

from kvweave.errors import DamagedEntry, StoreError, StoreTooNew
from kvweave.kvstore.capacity import Capacity
from kvweave.kvstore.catalog import UsageCounters
from kvweave.kvstore.eviction import choose_victims
from kvweave.kvstore.format import is_finite
from kvweave.kvstore.reports import VerifyReport
from kvweave.kvstore.shared_catalog import QueuedEntry, SharedCatalog
from kvweave.kvstore.tiers.circuit_breaker import CircuitBreaker
from kvweave.kvstore.tiers.disk import DiskTier
from kvweave.kvstore.tiers.fetching import RemoteReader

_LOG = logging.getLogger(__name__)

LIST_EVERY_S = 600.0
BATCH = 16  # operations between two looks at the queue
RETRY_AFTER_S = 1.0


class ReplicatedTier:
    """One namespace's entries in the shared tier; `reader` reads them, this keeps them in step.

    `rows` are what the catalogue knows of the tier, and `disk` has this machine's entries. The queue is processed by a thread
    that starts when it is first woken.
    """

    def __init__(
        self,
        namespace: str,
        tier: CircuitBreaker,
        rows: SharedCatalog,
        disk: DiskTier,
        capacity: Capacity,
        usage: UsageCounters,
    ) -> None:
        self.namespace = namespace
        self.tier = tier
        self.rows = rows
        self.reader = RemoteReader(namespace, tier, rows, usage)
        self._disk = disk
        self._capacity = capacity
        self._now_s = disk.catalog.now_s
        self._listed_at: float | None = None
        self._accepted_puts = 0
        self._refused: dict[str, int] = {}  # entries that the tier refused, and `_accepted_puts` at that time
        self._woken = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._warned = False
        rows.set_location(namespace, tier.location)
        rows.recover(namespace, self._now_s())

    @property
    def queue_length(self) -> int:
        return self.rows.queue_length(self.namespace)

    # The queue

    def process_queue(self) -> bool:
        """Do some of the queued operations; return whether any was done."""
        deletions, puts = self._next_operations()
        if not (deletions or puts) or self.tier.is_open or not self._ensure_listed():
            return False
        # Asked before any write: this distinguishes a tier that does not answer from one that refuses writes.
        present = self.tier.has_many([*deletions, *puts])
        if self.tier.failing:
            return False
        deleted = bool(deletions) and self.tier.delete(deletions)
        if deleted:
            self.rows.confirm_deletions(self.namespace, deletions)
        published = bool(puts) and self._publish(puts, present)
        return deleted or published

    def _next_operations(self) -> tuple[list[str], list[str]]:
        """Return the keys to delete and the keys to put now, refused ones last."""
        deletions, puts = list[str](), list[str]()
        if not self.tier.deleting.is_open:
            deletions = self.rows.queued(self.namespace, "delete", BATCH)
        if not self.tier.putting.is_open:
            limit = BATCH + len(self._refused)
            puts = self.rows.queued(self.namespace, "put", limit)
            if len(puts) < limit:
                # These are all that are queued: forget refused entries that are queued no more.
                self._refused = {key: self._refused[key] for key in puts if key in self._refused}
            puts.sort(key=lambda key: key in self._refused)
        return deletions, puts[:BATCH]

    def _publish(self, keys: Sequence[str], present: Collection[str]) -> bool:
        """Put these entries, except those that are present, while the tier accepts them; return whether any is done with."""
        entries = self.rows.begin_puts(self.namespace, keys, self._now_s())
        waiting, stored = {entry.key for entry in entries}, list[QueuedEntry]()
        for entry in sorted(entries, key=lambda entry: entry.key in self._refused):
            recent_bytes = sum(one.bytes for one in stored)
            outcome = "stored" if entry.key in present else self._put(entry, recent_bytes)
            if outcome == "waiting":
                if self.tier.is_open or self.tier.putting.is_open:
                    break
                continue
            waiting.remove(entry.key)
            self._refused.pop(entry.key, None)
            if outcome == "stored":
                stored.append(entry)
        done = [key for key in keys if key not in waiting]
        if done:
            self.rows.confirm_puts(self.namespace, done, stored)
        return bool(done)

    def _put(self, entry: QueuedEntry, recent_bytes: int) -> Literal["stored", "skipped", "waiting"]:
        """Put one entry; return whether the tier holds it now, or it is skipped for good, or waits to be tried again.

        Skipped are entries that are gone by now, that are not worth their room, or that the tier refuses while it accepts
        others: those that were refused before, if another entry was accepted since.

        `recent_bytes` were put lately and are not in the rows yet.
        """
        data = self._disk.read_bytes(entry.key)
        if data is None:
            return "skipped"
        if not self.make_room(entry.bytes + recent_bytes, entry.score):
            return "waiting" if self.tier.failing or self.tier.deleting.failing else "skipped"
        if self.tier.put(entry.key, data):
            self._accepted_puts += 1
            return "stored"
        if (
            self.tier.is_open
            or self._refused.setdefault(entry.key, self._accepted_puts) == self._accepted_puts
        ):
            return "waiting"
        _LOG.info("an entry stays on this machine: %s takes others, and not this one", self.tier.location)
        return "skipped"

    # The cap, and whether the rows are right

    def make_room(self, needed_bytes: int, score: float) -> bool:
        """Evict until `needed_bytes` fit under the cap; return False, and evict nothing, if a victim's score reaches `score`."""
        excess = self.rows.total(self.namespace).bytes + needed_bytes - self._capacity.limit("shared")
        if excess <= 0:
            return True
        rows = self.rows.lowest_scores(self.namespace, excess, frozenset(self._capacity.in_use()))
        victims = choose_victims(rows, excess)
        if sum(row.bytes for row in victims) < excess or victims[-1].score >= score:
            return False
        keys = [row.key for row in victims]
        if not self.tier.delete(keys):
            return False
        self.rows.remove(self.namespace, keys)
        return True

    def reconcile(self) -> int | None:
        """List the tier and correct the rows; return how many were wrong, None if the tier does not answer."""
        known_before = self.rows.known(self.namespace)
        sizes = self.tier.sizes()
        if sizes is None:
            return None
        self._listed_at = time.monotonic()
        self.rows.recover(self.namespace, self._now_s())
        return self.rows.reconcile(self.namespace, known_before, sizes, self._now_s())

    def _ensure_listed(self) -> bool:
        """List the tier unless it was listed lately; return False if it does not answer."""
        if self._listed_at is not None and time.monotonic() - self._listed_at < LIST_EVERY_S:
            return True
        return self.reconcile() is not None

    def verify(self, report: VerifyReport) -> VerifyReport:
        """Read and check every entry, correct the rows, and return the report with the findings added."""
        checked, damaged = 0, []
        for key in self.tier.sizes() or ():
            data = self.tier.get_many([key]).get(key)
            if data is None:
                continue
            checked += 1
            try:
                if not is_finite(self.reader.verified(key, data).content):
                    raise DamagedEntry(f"entry {key} of {self.tier.location} holds NaN or infinity")
            except DamagedEntry as error:
                self.reader.drop_damaged(key, error)
                damaged.append(str(error))
            except StoreTooNew as error:
                report = replace(report, newer=(*report.newer, str(error)))
        wrong = self.reconcile()
        silent = () if wrong is not None else (f"{self.tier.location} does not answer",)
        return replace(
            report,
            shared_checked=checked,
            shared_damaged=tuple(damaged),
            shared_reconciled=wrong or 0,
            unopened=(*report.unopened, *silent),
        )

    def clear(self) -> int:
        """Delete all of the namespace's entries; return how many, 0 if the tier does not answer."""
        keys = list(self.tier.sizes() or ())
        if not self.tier.delete(keys):
            return 0
        self.rows.remove(self.namespace, keys)
        self.reconcile()
        return len(keys)

    # The thread

    def wake(self) -> None:
        self._woken.set()
        with self._guard:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, name="kvweave-shared", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Process what is left, unless the tier fails; end the thread and close the tier."""
        with self._guard:
            self._closing = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
        self._process()
        self.tier.close()

    def _run(self) -> None:
        while not self._closing:
            # Operations may be left that become possible without another call of `wake`.
            must_retry = self._warned or self.tier.failing or self.tier.refusing
            self._woken.wait(RETRY_AFTER_S if must_retry else None)
            self._woken.clear()
            if not self._closing:
                self._process()

    def _process(self) -> None:
        try:
            while self.process_queue():
                pass
            self._warned = False
        except (StoreError, sqlite3.Error, OSError) as error:
            if not self._warned:
                _LOG.warning("the shared tier is not kept in step for now: %s", error)
            self._warned = True
