"""What a store consists of, and how its components are put together."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvweave.database import Database
from kvweave.errors import InvalidRequest, StoreError
from kvweave.kvstore.capacity import Capacity, check_limit
from kvweave.kvstore.catalog import Catalog, UsageCounters
from kvweave.kvstore.format import ParsedEntry
from kvweave.kvstore.ownership import Ownership
from kvweave.kvstore.reports import TierName
from kvweave.kvstore.shared_catalog import SharedCatalog
from kvweave.kvstore.tiers import disk_check
from kvweave.kvstore.tiers.circuit_breaker import CircuitBreaker
from kvweave.kvstore.tiers.disk import DiskTier, EntryFiles
from kvweave.kvstore.tiers.leases import Pins
from kvweave.kvstore.tiers.loading import Loader
from kvweave.kvstore.tiers.object_store import ObjectTier
from kvweave.kvstore.tiers.redis import SCHEMES, RedisTier
from kvweave.kvstore.tiers.replication import ReplicatedTier, ReplicationThread
from kvweave.kvstore.tiers.tier import RemoteTier
from kvweave.kvstore.tiers.tiered import TieredStore


def open_remote_tier(url: str, namespace: str) -> RemoteTier:
    """Return the tier at an address, for one namespace; sends no request yet.

    Args:
        url: see `RedisTier` and `ObjectTier`.
        namespace: entries of other namespaces are never seen.

    Raises:
        MissingExtra: the client for this kind of server is not installed.
        InvalidRequest: no such kind of address.
    """
    scheme = urlsplit(url).scheme
    if not scheme:
        raise InvalidRequest(
            f"{url!r} is no address of a shared tier; write for example redis://host:6379/0 or s3://bucket/prefix"
        )
    return RedisTier(url, namespace) if scheme in SCHEMES else ObjectTier(url, namespace)


@dataclass(frozen=True, slots=True)
class StoreComponents:
    """The components of one store; `replication` is None if there is no shared tier."""

    database: Database
    closes_database: bool
    catalog: Catalog
    ownership: Ownership
    capacity: Capacity
    usage: UsageCounters
    pins: Pins
    tiers: TieredStore
    replication: ReplicationThread | None

    def close(self) -> None:
        """Close everything, in the order in which the components need each other."""
        if self.database.closed:
            return
        self.usage.try_flush()
        self.tiers.close()
        if self.replication is not None:
            self.replication.close()
        if self.tiers.shared is not None:
            self.tiers.shared.close()
        self.tiers.disk.files.forget()
        if self.closes_database:
            self.database.close()


def assemble(
    folder: Path,
    namespace: str,
    limits: Mapping[TierName, int],
    shared: str | None,
    database: Database | None,
    owned_only: bool,
) -> StoreComponents:
    """Return the components of the store in a folder; see `ChunkStore` for the arguments and the errors."""
    for limit_bytes in limits.values():
        check_limit(limit_bytes)
    with ExitStack() as undo:  # closes what is open if the rest cannot be opened
        server = None
        if shared is not None:
            server = CircuitBreaker(open_remote_tier(shared, namespace))
            undo.callback(server.close)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder} cannot be used as a store: {error.strerror}") from error
        own = database
        if own is None:
            own = Database(folder / "catalog.sqlite")
            undo.callback(own.close)
        components = _connect(folder, namespace, server, own, database is None, owned_only)
        _start(components, limits, owned_only)
        undo.pop_all()
    return components


def _connect(
    folder: Path,
    namespace: str,
    server: CircuitBreaker | None,
    database: Database,
    closes_database: bool,
    owned_only: bool,
) -> StoreComponents:
    pins = Pins()
    rows = SharedCatalog(database)
    catalog = Catalog(database, rows)
    ownership = Ownership(database, catalog, namespace)
    capacity = Capacity(database, catalog, folder, pins.in_use)
    usage = UsageCounters(database, catalog)
    reads: Loader[ParsedEntry | None] = Loader()
    owners = ownership if owned_only else None

    def drop_copies(keys: Iterable[str]) -> None:
        tiers.drop_copies(keys)

    disk = DiskTier(database, catalog, EntryFiles(folder), capacity, owners, usage, reads, drop_copies)
    shared = None
    if server is not None:
        shared = ReplicatedTier(
            namespace,
            server,
            rows,
            disk.read_bytes,
            limit_bytes=lambda: capacity.limits.get("shared"),
            in_use=pins.in_use,
            now_s=catalog.now_s,
            on_damage=lambda: usage.add("damaged"),
        )
    tiers = TieredStore(database, catalog, disk, shared, pins, reads)
    return StoreComponents(
        database=database,
        closes_database=closes_database,
        catalog=catalog,
        ownership=ownership,
        capacity=capacity,
        usage=usage,
        pins=pins,
        tiers=tiers,
        replication=None if shared is None else ReplicationThread(shared),
    )


def _start(components: StoreComponents, limits: Mapping[TierName, int], owned_only: bool) -> None:
    """Set the caps, look after files without rows, and resume the replication queue."""
    stored, disk, shared = components.capacity.limits, components.tiers.disk, components.tiers.shared
    for tier, limit_bytes in limits.items():
        if tier != "disk":
            stored.set(tier, limit_bytes)
    components.tiers.host.set_limit(stored.get("host"))
    if components.database.read_only:
        return
    if "disk" in limits:
        disk.set_limit(limits["disk"])
    if components.catalog.is_new:
        disk_check.recover(disk, relisting=not owned_only)
    elif disk_check.is_sweep_due(disk.files):
        disk_check.sweep(disk.files, components.catalog)
    if components.replication is not None and shared is not None and shared.queue_length:
        components.replication.wake()
