"""Caps, statistics, checking and emptying of a store, tier by tier."""

from dataclasses import dataclass, field

import torch

from kvweave.errors import DamagedEntry, InvalidRequest, StoreTooNew
from kvweave.kvstore.catalog import Catalog
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.parts import StoreParts
from kvweave.kvstore.reports import TIERS, StoreStats, TierName, TierTotals, VerifyReport
from kvweave.kvstore.tiers.disk import DiskTier
from kvweave.kvstore.tiers.memory import DeviceTier, HostEntry, Residents
from kvweave.types import ChunkKV


@dataclass(slots=True)
class Findings:
    """`damaged`, `newer` and `unopened` give for a file's name what is wrong; `checked` files were read in full.

    `sizes` gives those of whole files that are counted with another size.
    """

    checked: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    newer: dict[str, str] = field(default_factory=dict)
    unopened: dict[str, str] = field(default_factory=dict)


def check_entries(catalog: Catalog, tier: DiskTier) -> Findings:
    """Read every listed file, one after the other, holding none of them in memory; changes nothing."""
    findings = Findings()
    for name, (key, counted) in catalog.stated_by_file().items():
        try:
            stored = tier.open(name)
            verify_content(stored.content)
            size = tier.size_bytes(name)
        except FileNotFoundError:
            findings.damaged[name] = f"{tier.folder / name} is missing"
        except StoreTooNew as error:
            findings.newer[name] = str(error)
        except DamagedEntry as error:
            findings.damaged[name] = str(error)
        except OSError as error:  # no permission, no descriptors left: the entry itself may be whole
            findings.unopened[name] = str(error)
        else:
            findings.checked += 1
            if stored.key.digest != key:
                findings.damaged[name] = f"{tier.folder / name} holds entry {stored.key.digest}, not {key}"
            elif size != counted:
                findings.sizes[name] = size
    return findings


def set_limit(parts: StoreParts, tier: TierName, limit_bytes: int) -> None:
    """See `ChunkStore.set_limit`."""
    parts.usage.flush_quietly()
    if tier == "disk":
        with parts.database.transaction():
            parts.files.evict(parts.capacity.set_limit(limit_bytes))
        return
    parts.capacity.limits.set(tier, limit_bytes)
    if tier == "host":
        parts.tiers.limit_host(limit_bytes)
    elif tier == "device" and parts.tiers.device is not None:
        parts.tiers.device.residents.set_limit(limit_bytes)
    elif tier == "shared" and parts.tiers.shared is not None:
        parts.tiers.shared.make_room(0, float("inf"))


def clear(parts: StoreParts, tier: TierName) -> int:
    """See `ChunkStore.clear`."""
    if tier == "disk":
        parts.tiers.forget_copies()
        with parts.database.transaction():
            return parts.files.discard(parts.catalog.drop_all())
    if tier == "shared":
        if parts.tiers.shared is None:
            raise InvalidRequest("there is no shared tier; set `shared` to its address")
        return parts.tiers.shared.clear()
    held = _in_memory(parts, tier)
    if held is None:
        return 0
    keys = held.sizes()
    held.drop(keys)
    return len(keys)


def attach_device(parts: StoreParts, device: torch.device, limit_bytes: int | None) -> None:
    """See `ChunkStore.attach_device`."""
    if limit_bytes is not None:
        parts.capacity.limits.set("device", limit_bytes)
    if device.type != "cpu":
        cap = parts.capacity.limits.of("device")  # attached with a cap of 0 too: it may be raised later
        parts.tiers.attach(DeviceTier(device, cap, parts.pins.in_use))


def stats(parts: StoreParts) -> StoreStats:
    """See `ChunkStore.stats`."""
    parts.usage.flush_quietly()
    by_kind = parts.catalog.totals()
    counts = parts.usage.totals()
    total = {
        "entries": sum(kind.entries for kind in by_kind.values()),
        "bytes": sum(kind.bytes for kind in by_kind.values()),
    }
    return StoreStats(
        **total,
        tokens=sum(kind.tokens for kind in by_kind.values()),
        limit_bytes=parts.capacity.limit_bytes,
        by_kind=by_kind,
        by_tier={tier: _tier_totals(parts, tier, total, counts[f"hits_{tier}"]) for tier in TIERS},
        hits=counts["hits"],
        misses=counts["misses"],
        damaged=counts["damaged"],
        evicted=counts["evicted"],
    )


def verify(parts: StoreParts, tier: TierName | None) -> VerifyReport:
    """See `ChunkStore.verify`."""
    report = VerifyReport()
    if tier in (None, "disk"):
        report = _verify_disk(parts)
    if tier in (None, "shared") and parts.tiers.shared is not None:
        report = parts.tiers.shared.verify(report)
    return report


def _verify_disk(parts: StoreParts) -> VerifyReport:
    found = check_entries(parts.catalog, parts.folder)
    dropped = tuple(why for name, why in found.damaged.items() if parts.files.drop_damaged(name, why))
    parts.catalog.correct_sizes(found.sizes)
    return VerifyReport(
        checked=found.checked,
        damaged=dropped,
        newer=tuple(found.newer.values()),
        unopened=tuple(found.unopened.values()),
        swept_files=parts.files.sweep(),
        miscounted=not parts.catalog.recount(),
    )


def _tier_totals(parts: StoreParts, tier: TierName, disk: dict[str, int], hits: int) -> TierTotals:
    limit = parts.capacity.limits.of(tier)
    if tier == "disk":
        return TierTotals(disk["entries"], disk["bytes"], limit, hits)
    if tier == "shared":
        return _shared_totals(parts, limit, hits)
    held = _in_memory(parts, tier)
    if held is None:
        return TierTotals(0, 0, limit, hits, state="none")
    return TierTotals(len(held), held.used_bytes, limit, hits, state="of this process")


def _shared_totals(parts: StoreParts, limit: int, hits: int) -> TierTotals:
    shared = parts.tiers.shared
    if shared is None:
        return TierTotals(0, 0, limit, hits, state="none")
    total = shared.rows.total(shared.namespace)
    waiting = shared.rows.waiting(shared.namespace)
    trouble = " (refuses changes)" if shared.tier.refusing else ""
    trouble = " (does not answer)" if shared.tier.failing else trouble
    return TierTotals(total.entries, total.bytes, limit, hits, waiting, shared.tier.place + trouble)


def _in_memory(parts: StoreParts, tier: TierName) -> Residents[HostEntry] | Residents[ChunkKV] | None:
    """What the host or a device holds; None if there is no device."""
    if tier == "host":
        return parts.tiers.host.residents
    return None if parts.tiers.device is None else parts.tiers.device.residents
