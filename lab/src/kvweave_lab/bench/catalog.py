"""How long a request waits for the catalogue of a large store: one look-up of a prompt's spans among many entries.

The entries have rows and no files, put in by the catalogue itself, all in one transaction. Its pages are in memory, as
those of a store in use are.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvweave.database import Database
from kvweave.kvstore.catalog import Catalog, NewEntry
from kvweave.kvstore.keys import EntryKey
from kvweave.types import KVProvenance
from kvweave_lab.bench.spread import Spread, timed

LOOK_UPS = 1000
_MADE = KVProvenance("isolated", ("0" * 32,))
_TOKENS, _BYTES = 512, 6_000_000


@dataclass(frozen=True, slots=True)
class CatalogSpeed:
    """`look_up_s`: seconds of one look-up of `spans` entries, drawn anew each time, among `entries`."""

    entries: int
    spans: int
    look_ups: int
    look_up_s: Spread


def bench_catalog(folder: Path, *, entries: int, spans: int, progress: Callable[[int], None]) -> CatalogSpeed:
    """Make a catalogue of so many entries in `folder` and look `spans` of them up; at least as many must there be."""
    database = Database(folder / "catalog.sqlite")
    try:
        catalog = Catalog(database)
        keys = _fill(database, catalog, entries, progress)
        draw = random.Random(0)

        def look_up(wanted: list[str]) -> float:
            taken_s = timed(lambda: catalog.paths(wanted))
            assert len(catalog.paths(wanted)) == spans  # they were put here, and nobody else knows the folder
            return taken_s

        look_up(keys[:spans])  # what a process does once only
        taken = Spread.of(look_up(draw.sample(keys, spans)) for _ in range(LOOK_UPS))
    finally:
        database.close()
    return CatalogSpeed(entries, spans, LOOK_UPS, taken)


def _fill(database: Database, catalog: Catalog, entries: int, progress: Callable[[int], None]) -> list[str]:
    """The keys of so many new entries, each made from a chunk of its own."""
    keys = []
    with database.transaction():
        for number in range(entries):
            if number % 1000 == 0:
                progress(number)
            chunk = f"{number:032x}"
            key = EntryKey("default", "0" * 32, chunk, _MADE)
            catalog.insert(NewEntry(key, "none", _TOKENS, _BYTES, f"{number}.safetensors", [chunk]))
            keys.append(key.digest)
    return keys
