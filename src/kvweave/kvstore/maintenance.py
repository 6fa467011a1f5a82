"""Caps, statistics, verification and emptying of a store, tier by tier."""

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from kvweave.errors import DamagedEntry, InvalidRequest, StoreTooNew
from kvweave.kvstore.assembly import StoreComponents
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.reports import TIERS, StoreStats, TierName, TierTotals, VerifyReport
from kvweave.kvstore.tiers import orphans
from kvweave.kvstore.tiers.disk import DiskTier
from kvweave.kvstore.tiers.memory import DeviceTier
from kvweave.kvstore.tiers.replication import ReplicatedTier
from kvweave.kvstore.warned import WarnedTopics
from kvweave.types import ModelFingerprint

_LOG = logging.getLogger(__name__)


class StoreMaintenance:
    """The part of `ChunkStore` that is about the store as a whole: its caps, sizes and statistics, checks and emptying."""

    namespace: str

    def __init__(self, components: StoreComponents) -> None:
        self._components = components
        self._tiers = components.tiers
        self._usage = components.usage
        self._warned = WarnedTopics(_LOG)

    @property
    def limit_bytes(self) -> int:
        """The hard cap on the size of all files, in bytes."""
        return self._tiers.disk.limit_bytes

    @property
    def read_only(self) -> bool:
        """Whether the folder cannot be written to: entries are found, and none is stored, evicted or dropped."""
        return self._components.database.read_only

    @property
    def used_bytes(self) -> int:
        """Bytes of all listed files, of all namespaces; cheaper than `stats`, and writes nothing."""
        return self._tiers.disk.used_bytes

    @property
    def times_full(self) -> int:
        """How often this object has not stored an entry because the disk was full."""
        return self._tiers.disk.times_full

    @property
    def evicted(self) -> int:
        """How many entries this object has evicted from the disk."""
        return self._tiers.disk.evicted

    @property
    def unused_bytes(self) -> int:
        """The size of the files that no look-up has ever found: most of them are evicted first."""
        self._usage.try_flush()
        return self._components.catalog.unused_bytes()

    def other_models(self, model: ModelFingerprint, chunks: Sequence[Sequence[int]]) -> list[str]:
        """Return the names of other models that have made KV of these chunks, given by their token ids.

        Reads no file and is not counted.
        """
        digests = [digest_tokens(ids) for ids in chunks]
        return self._components.catalog.other_models(self.namespace, model.digest, digests)

    def prepared_chunks(self, model: ModelFingerprint) -> int:
        """Return how many chunks have KV of this model that was prepared, not left by a request; reads every row."""
        return self._components.catalog.prepared_chunks(self.namespace, model.digest)

    def retrieved_chunks(self) -> dict[str, int]:
        """Return how often the KV of each chunk was looked up for a prompt, found or not, by its token digest."""
        self._usage.try_flush()
        return self._components.catalog.retrieved()

    def warn_once(self, topic: str, message: Callable[[], str]) -> None:
        """Log a warning, unless the topic was warned of since the store was opened; an empty message is none."""
        self._warned.warn(topic, message)

    def set_limit(self, limit_bytes: int, tier: TierName = "disk") -> None:
        """Change a tier's cap for good, and evict down to it at once.

        Raises:
            InvalidRequest: a negative limit.
            StoreFull: other programs have filled the disk to the last byte, so that the change cannot be recorded.
        """
        self._usage.try_flush()
        if tier != "disk":
            self._components.capacity.limits.set(tier, limit_bytes)
        if tier == "shared":
            if self._tiers.shared is not None:
                self._tiers.shared.make_room(0, float("inf"))
        elif (local := self._tiers.local(tier)) is not None:
            local.set_limit(limit_bytes)

    def clear(self, tier: TierName = "disk") -> int:
        """Drop every entry of a tier; return how many.

        Ownership stays. Clearing the disk drops the entries of all namespaces, and everything in memory. Clearing the shared
        tier drops the entries of this namespace.
        """
        if tier == "shared":
            if self._tiers.shared is None:
                raise InvalidRequest("there is no shared tier; set `shared` to its address")
            return self._tiers.shared.clear()
        if tier == "disk":
            self._tiers.clear_memory()
        local = self._tiers.local(tier)
        return 0 if local is None else local.clear()

    def stats(self) -> StoreStats:
        """Return how much is stored, and how it was used since the store was created."""
        self._usage.try_flush()
        by_kind, counts = self._components.catalog.totals(), self._usage.totals()
        disk = TierTotals(
            entries=sum(kind.entries for kind in by_kind.values()),
            bytes=sum(kind.bytes for kind in by_kind.values()),
            limit_bytes=self.limit_bytes,
            hits=counts["hits_disk"],
        )
        by_tier = {
            tier: disk if tier == "disk" else _tier_totals(self._components, tier, counts[f"hits_{tier}"])
            for tier in TIERS
        }
        return StoreStats(
            entries=disk.entries,
            tokens=sum(kind.tokens for kind in by_kind.values()),
            bytes=disk.bytes,
            limit_bytes=disk.limit_bytes,
            by_kind=by_kind,
            by_tier=by_tier,
            hits=counts["hits"],
            misses=counts["misses"],
            damaged=counts["damaged"],
            evicted=counts["evicted"],
        )

    def verify(self, tier: TierName | None = None) -> VerifyReport:
        """Read every entry in full, drop damaged ones, delete files without rows, and correct the counters.

        Files younger than ten minutes are left alone: another process may be about to list them. With `tier` disk or shared,
        only that one is checked. Entries in memory were verified when they were copied there.
        """
        report = VerifyReport()
        if tier in (None, "disk"):
            report = _verify_disk(self._components)
        if tier in (None, "shared") and self._tiers.shared is not None:
            report = self._tiers.shared.verify(report)
        return report

    def attach_device(self, device: torch.device, limit_bytes: int | None = None) -> None:
        """Keep copies of the most used KV on the model's device, as many as the cap allows.

        Args:
            device: for a CPU this does nothing: its memory is the host's.
            limit_bytes: the cap, kept from then on; None leaves the cap as it is, at first 0, which holds none.
        """
        limits = self._components.capacity.limits
        if limit_bytes is not None:
            limits.set("device", limit_bytes)
        if device.type != "cpu":
            # Attached with a cap of 0 too: it may be raised later.
            self._tiers.attach(DeviceTier(device, limits.get("device"), self._components.pins.in_use))

    def forget_recent(self) -> None:
        """Drop all copies in memory and all mappings: the next look-up reads its file from the disk and verifies it.

        The kernel is asked to drop the pages of all files (not on macOS). It keeps pages that are still mapped: drop
        references to found KV first.
        """
        self._tiers.clear_memory()
        self.forget_files()

    def forget_files(self) -> None:
        """As `forget_recent`, but keep the copies in the memory tiers of host and device."""
        files = self._tiers.disk.files
        files.forget()
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        for name in self._components.catalog.all_paths():
            with suppress(OSError), files.path(name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Statistics


def _tier_totals(store: StoreComponents, tier: TierName, hits: int) -> TierTotals:
    limit_bytes, tiers = store.capacity.limits.get(tier), store.tiers
    if tier == "shared":
        return _shared_totals(tiers.shared, limit_bytes, hits)
    local = tiers.local(tier)
    if local is None:
        return TierTotals(0, 0, limit_bytes, hits, state="none")
    return TierTotals(len(local.sizes()), local.used_bytes, limit_bytes, hits, state="of this process")


def _shared_totals(shared: ReplicatedTier | None, limit_bytes: int, hits: int) -> TierTotals:
    if shared is None:
        return TierTotals(0, 0, limit_bytes, hits, state="none")
    total = shared.rows.total(shared.namespace)
    trouble = " (refuses changes)" if shared.tier.refusing else ""
    trouble = " (does not answer)" if shared.tier.failing else trouble
    state = shared.tier.location + trouble
    return TierTotals(total.entries, total.bytes, limit_bytes, hits, shared.queue_length, state)


# Verification


def _verify_disk(store: StoreComponents) -> VerifyReport:
    disk, catalog = store.tiers.disk, store.catalog
    findings = _check_files(disk)
    dropped = tuple(reason for name, reason in findings.damaged.items() if disk.drop_damaged(name, reason))
    catalog.correct_sizes(findings.sizes)
    return VerifyReport(
        checked=findings.checked,
        damaged=dropped,
        newer=tuple(findings.newer.values()),
        unopened=tuple(findings.unopened.values()),
        swept_files=orphans.sweep(disk.files, catalog),
        miscounted=not catalog.recount(),
    )


@dataclass(slots=True)
class _Findings:
    """`damaged`, `newer` and `unopened` give the reason by file name; `checked` files were read in full.

    `sizes` gives the sizes of sound files that are counted with another size.
    """

    checked: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    newer: dict[str, str] = field(default_factory=dict)
    unopened: dict[str, str] = field(default_factory=dict)


def _check_files(disk: DiskTier) -> _Findings:
    """Read every listed file, one after the other, holding none of them in memory; changes nothing."""
    findings = _Findings()
    for name, (key, counted_bytes) in disk.catalog.expected_files().items():
        path = disk.files.path(name)
        try:
            entry = disk.files.open(name)
            verify_content(entry.content)
        except FileNotFoundError:
            findings.damaged[name] = f"{path} is missing"
        except StoreTooNew as error:
            findings.newer[name] = str(error)
        except DamagedEntry as error:
            findings.damaged[name] = str(error)
        except OSError as error:  # no permission, no descriptors left: the entry itself may be whole
            findings.unopened[name] = str(error)
        else:
            findings.checked += 1
            if entry.key.digest != key:
                findings.damaged[name] = f"{path} holds entry {entry.key.digest}, not {key}"
            elif entry.bytes != counted_bytes:
                findings.sizes[name] = entry.bytes
    return findings
