"""What a store consists of, and how the parts are put together."""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvweave.database import Database
from kvweave.errors import StoreError
from kvweave.kvstore.capacity import Capacity, check_limit
from kvweave.kvstore.catalog import Catalog
from kvweave.kvstore.ownership import Ownership
from kvweave.kvstore.recent import RecentEntries
from kvweave.kvstore.reports import TierName
from kvweave.kvstore.shared_catalog import SharedCatalog
from kvweave.kvstore.tiers.circuit_breaker import CircuitBreaker
from kvweave.kvstore.tiers.disk import AdoptingFiles, DiskTier
from kvweave.kvstore.tiers.factory import open_shared
from kvweave.kvstore.tiers.leases import Pins
from kvweave.kvstore.tiers.memory import HostTier
from kvweave.kvstore.tiers.replication import ReplicatedTier, ReplicationThread
from kvweave.kvstore.tiers.tiered import Tiered
from kvweave.kvstore.usage import UsageCounters

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreParts:
    """The parts of one store. `errands` is None where there is no shared tier."""

    database: Database
    closes_database: bool
    namespace: str
    catalog: Catalog
    ownership: Ownership
    capacity: Capacity
    usage: UsageCounters
    recent: RecentEntries
    folder: DiskTier
    files: AdoptingFiles
    pins: Pins
    tiers: Tiered
    errands: ReplicationThread | None

    def wake_later(self) -> None:
        """Once what was changed is committed, see what is to be done in the shared tier."""
        if self.errands is not None:
            self.database.after_commit(self.errands.wake)

    def forget(self) -> None:
        """Let go of what was read, and ask the kernel to do so too."""
        self.tiers.forget_copies()
        self.forget_files()

    def forget_files(self) -> None:
        """The same of what lies in files alone; copies in memory stay."""
        self.recent.clear()
        self.folder.forget(self.catalog.listed())

    def close(self) -> None:
        """In the order in which the parts need each other."""
        if self.database.closed:
            return
        self.usage.flush_quietly()
        self.tiers.close()
        if self.errands is not None:
            self.errands.close()
        if self.tiers.shared is not None:
            self.tiers.shared.close()
        self.recent.clear()
        if self.closes_database:
            self.database.close()


def open_parts(
    folder: Path,
    namespace: str,
    limits: Mapping[TierName, int],
    shared: str | None,
    database: Database | None,
    owned_only: bool,
) -> StoreParts:
    """The parts of the store in a folder; see `ChunkStore` for the arguments and the errors."""
    for limit_bytes in limits.values():
        check_limit(limit_bytes)
    with ExitStack() as undo:  # whatever is opened, if the rest cannot be
        server = None
        if shared is not None:
            server = CircuitBreaker(open_shared(shared, namespace))
            undo.callback(server.close)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} cannot be used as a store: {error.strerror}") from error
        own = database
        if own is None:
            own = Database(folder / "catalog.sqlite")
            undo.callback(own.close)
        parts = _assemble(folder, namespace, server, own, database is None, owned_only)
        _begin(parts, limits, owned_only)
        undo.pop_all()
    return parts


def _begin(parts: StoreParts, limits: Mapping[TierName, int], owned_only: bool) -> None:
    """Hold the caps, those given from now on, look after the files, and go on with what was left to do."""
    for tier, limit_bytes in limits.items():
        if tier != "disk":
            parts.capacity.limits.set(tier, limit_bytes)
    parts.tiers.host.residents.set_limit(parts.capacity.limits.of("host"))
    if "disk" in limits:
        parts.usage.flush_quietly()
        with parts.database.transaction():
            parts.files.evict(parts.capacity.set_limit(limits["disk"]))
    if parts.catalog.is_new:
        _save_files(parts, owned_only)
    elif parts.folder.sweep_is_due():
        parts.files.sweep()
    if parts.errands is not None and parts.errands.pending:
        parts.errands.wake()


def _save_files(parts: StoreParts, owned_only: bool) -> None:
    """A catalogue that is lost takes no files along: they are listed again, or left until their documents are."""
    parts.folder.sweep([], set())  # counts as a sweep, so that the next one leaves time for that
    if not owned_only:
        relisted = parts.files.relist_all()
        if relisted:
            _LOG.warning(
                "the catalogue of %s was lost; %d entries are listed again", parts.folder.folder, relisted
            )


def _assemble(
    folder: Path,
    namespace: str,
    server: CircuitBreaker | None,
    database: Database,
    closes_database: bool,
    owned_only: bool,
) -> StoreParts:
    pins = Pins()
    rows = SharedCatalog(database)
    catalog = Catalog(database, rows)
    ownership = Ownership(database, catalog, namespace)
    capacity = Capacity(database, catalog, folder, pins.in_use)
    usage = UsageCounters(database, catalog)
    entry_folder = DiskTier(folder)
    recent = RecentEntries()
    files = AdoptingFiles(
        database, catalog, entry_folder, capacity, ownership if owned_only else None, recent, usage
    )
    shared = None
    if server is not None:
        shared = ReplicatedTier(
            namespace,
            server,
            rows,
            files.mapped,
            limit_bytes=lambda: capacity.limits.of("shared"),
            in_use=pins.in_use,
            now_s=catalog.now_s,
            on_damage=lambda: usage.add("damaged"),
        )
    tiers = Tiered(database, catalog, files, HostTier(0, pins.in_use), shared, pins)
    files.on_discard = tiers.forget
    return StoreParts(
        database=database,
        closes_database=closes_database,
        namespace=namespace,
        catalog=catalog,
        ownership=ownership,
        capacity=capacity,
        usage=usage,
        recent=recent,
        folder=entry_folder,
        files=files,
        pins=pins,
        tiers=tiers,
        errands=None if shared is None else ReplicationThread(shared),
    )
