"""Whether the disk's files and the catalogue's rows agree: `verify` reads every file that a row lists.

Of the files that no row lists, old ones are deleted, and those of a lost catalogue are listed again. A young one may be one
whose row is about to be committed by another process, and is left alone.
"""

import logging
from contextlib import suppress

from kvweave.errors import DamagedEntry, StoreError, StoreTooNew
from kvweave.files import DEAD_WRITER_AFTER_S, age_s, is_abandoned
from kvweave.kvstore.catalog import Catalog
from kvweave.kvstore.format import check_entry, is_finite, verify_content
from kvweave.kvstore.reports import VerifyReport
from kvweave.kvstore.tiers.disk import SUFFIX, DiskTier, EntryFiles, key_of

_LOG = logging.getLogger(__name__)

UNLISTED_AFTER_S = 600.0
"""After this long, the writer of a file would have listed it."""

_SWEPT = ".swept"  # its time of modification is that of the last sweep


def needs_sweep(files: EntryFiles) -> bool:
    """Return whether the last sweep is so long ago that another one may find something."""
    mark = files.folder / _SWEPT
    return not mark.exists() or age_s(mark) > UNLISTED_AFTER_S


def sweep(files: EntryFiles, catalog: Catalog) -> int:
    """Delete old files that no row lists, and what killed writers left behind; return how many."""
    names = files.scan()  # before the rows: a file whose row is committed in between is then seen as listed
    listed = set(catalog.all_paths())
    orphans = [name for name in names if name.endswith(SUFFIX) and name not in listed]
    old = [name for name in orphans if age_s(files.path(name)) > UNLISTED_AFTER_S]
    return _delete(files, old + _abandoned(files, names))


def recover(disk: DiskTier, *, relisting: bool) -> None:
    """Look after the files of a lost catalogue: list them again, or leave them until `relist` is called for them.

    Counts as a sweep, so that the next one leaves time for that.
    """
    names = disk.files.scan()
    _delete(disk.files, _abandoned(disk.files, names))
    if relisting:
        keys = {key_of(name) for name in names if name.endswith(SUFFIX)}
        count = sum(relist(disk, key) for key in sorted(keys - disk.catalog.paths(keys).keys()))
        if count:
            _LOG.warning(
                "the catalogue of %s was lost; %d entries are listed again", disk.files.folder, count
            )


def relist(disk: DiskTier, key: str) -> bool:
    """List a file of this key that lost its row, unless it is young; return whether there was one.

    Its KV is verified when it is used.
    """
    folder = disk.files.folder
    for path in sorted((folder / key[:2]).glob(f"{key}.*{SUFFIX}")):
        if age_s(path) < DEAD_WRITER_AFTER_S:
            continue
        name = path.relative_to(folder).as_posix()
        try:
            entry = disk.files.open(name)
            if entry.key.digest == key and disk.relist(entry, name):
                return True
        except (StoreError, OSError) as error:
            _LOG.warning("unlisted entry not used: %s", error)
    return False


def verify(disk: DiskTier) -> VerifyReport:
    """Read every listed file in full, drop damaged ones, delete files without rows, and correct the counters.

    Reads one file after the other, and holds none of them in memory.
    """
    catalog, checked = disk.catalog, 0
    damaged, newer, unopened = list[str](), list[str](), list[str]()
    sizes: dict[str, int] = {}  # of sound files that are counted with another size
    for name, (key, counted_bytes) in catalog.expected_files().items():
        path, reason = disk.files.path(name), ""
        try:
            entry = disk.files.open(name)
            verify_content(entry.content)
            if not is_finite(entry.content):  # earlier versions stored it
                raise DamagedEntry(f"{path} holds NaN or infinity")
            checked += 1
            check_entry(entry, key, None, path)
            if entry.bytes != counted_bytes:
                sizes[name] = entry.bytes
        except FileNotFoundError:
            reason = f"{path} is missing"
        except DamagedEntry as error:
            reason = str(error)
        except StoreTooNew as error:
            newer.append(str(error))
        except OSError as error:  # no permission, no descriptors left: the entry itself may be whole
            unopened.append(str(error))
        if reason and disk.drop_damaged(name, reason):
            damaged.append(reason)
    catalog.correct_sizes(sizes)
    return VerifyReport(
        checked=checked,
        damaged=tuple(damaged),
        newer=tuple(newer),
        unopened=tuple(unopened),
        swept_files=sweep(disk.files, catalog),
        miscounted=not catalog.recount(),
    )


def _delete(files: EntryFiles, names: list[str]) -> int:
    files.delete(names)
    with suppress(OSError):  # a full or read-only disk: the next sweep just comes earlier
        (files.folder / _SWEPT).touch()
    return len(names)


def _abandoned(files: EntryFiles, names: list[str]) -> list[str]:
    """Return the temporary files of killed writers."""
    return [name for name in names if is_abandoned(files.path(name))]
