"""What a store costs as it grows to a million entries: adding, looking up, evicting, opening and verifying.

    python lab/experiments/store_size.py --folder /var/tmp/many --output lab/results/store_size.json

Entries are real ones, of 8 tokens of a tiny shape, each a file of its own, added one after another as requests add them. Their
sizes do not matter to the catalogue; what reading and writing KV of real sizes takes is `kvweave bench store`'s subject.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.types import ChunkKV, KVProvenance
from kvweave_lab.cli import bench_options as bench
from kvweave_lab.faults.damage import MODEL

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
MADE: Final = KVProvenance("isolated", ("0" * 32,))
TIMED: Final = 1_000
EVICTED: Final = 200
SPANS: Final = 8
"""Chunks of a prompt that are looked up together."""
UNLIMITED: Final = 2**62
START: Final = """
import sys, time
from kvweave.kvstore.chunk_store import ChunkStore
began = time.perf_counter()
with ChunkStore(sys.argv[1]) as store:
    entries = store.stats().entries
print(time.perf_counter() - began, entries)
"""


def tokens_of(number: int) -> tuple[int, ...]:
    """Return the token ids of an entry."""
    return (number, 1, 2, 3, 4, 5, 6, 7)


class Entries:
    """A store's entries, which are numbered as they are added; `first` is the first one of this size."""

    def __init__(self) -> None:
        self.first = self.number = 0
        self._kv = torch.randn(2, 2, 1, 8, 4)

    def add(self, store: ChunkStore) -> None:
        """Store one more."""
        ids = tokens_of(self.number)
        if not store.put(MODEL, ChunkKV(ids, self._kv), MADE, [digest_tokens(ids)]):
            raise SystemExit(f"entry {self.number} was not stored: is the disk full?")
        self.number += 1


def times_of(action: Callable[[int], object], count: int) -> dict[str, float]:
    """Return median, 99th percentile and largest of the seconds that an action takes, for numbers below `count`."""
    taken = []
    for number in range(count):
        began = time.perf_counter()
        action(number)
        taken.append(time.perf_counter() - began)
    taken.sort()
    return {"median": taken[len(taken) // 2], "p99": taken[int(0.99 * len(taken))], "longest": taken[-1]}


def opened_s(folder: Path) -> dict[str, float]:
    """Return the seconds in which a fresh process opens the store and counts it, over five processes."""
    found = []
    for _ in range(5):
        said = subprocess.run(
            [sys.executable, "-c", START, str(folder)], check=True, capture_output=True, text=True
        )
        found.append(float(said.stdout.split()[0]))
    return {"median": sorted(found)[2], "longest": max(found)}


def measured(
    store: ChunkStore, folder: Path, entries: Entries, size: int, adding: dict[str, float]
) -> dict[str, Any]:
    """Return the row of a store of `size` entries; leaves as many entries as before."""
    drawn = random.Random(size)
    wanted, absent = (
        [[(tokens_of(drawn.randrange(low, high)), [MADE]) for _ in range(SPANS)] for _ in range(TIMED)]
        for low, high in ((entries.first, entries.number), (2**30, 2**31))
    )
    found = times_of(lambda number: store.find(MODEL, wanted[number]), TIMED)
    missed = times_of(lambda number: store.find(MODEL, absent[number]), TIMED)
    before = store.stats()
    store.set_limit(before.bytes)  # from here on each new entry evicts one
    evicting = times_of(lambda _: entries.add(store), EVICTED)
    began = time.perf_counter()
    store.set_limit(int(0.99 * before.bytes))
    evict_s = time.perf_counter() - began
    evicted = before.entries - store.stats().entries
    store.set_limit(UNLIMITED)
    for _ in range(evicted):
        entries.add(store)
    began = time.perf_counter()
    report = store.verify()
    verify_s = time.perf_counter() - began
    if not report.sound or report.checked != size:
        raise SystemExit(f"the store of {size} entries is not sound: {report}")
    return {
        "entries": size,
        "add_s": adding,
        "find_s": found,
        "miss_s": missed,
        "add_evicting_s": evicting,
        "evicted": evicted,
        "evict_s": evict_s,
        "verify_s": verify_s,
        "start_s": opened_s(folder),
        "catalogue_bytes": sum(path.stat().st_size for path in folder.glob("catalog.sqlite*")),
        "entry_bytes": before.bytes // before.entries,
    }


def main() -> None:
    """Fill a store, and measure it at each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where the store goes; default: a temporary folder")
    parser.add_argument("--size", type=int, action="append", help="number of entries; repeatable")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="kvweave-size-", dir=args.folder))
    rows, entries, held = list[dict[str, Any]](), Entries(), 0
    try:
        for size in sorted(args.size or SIZES):
            entries.first = entries.number
            with ChunkStore(folder, limit_bytes=UNLIMITED) as store:
                for _ in range(size - held - TIMED):
                    entries.add(store)
                adding = times_of(lambda _: entries.add(store), TIMED)
                rows.append(measured(store, folder, entries, size, adding))
            held = size
            print(json.dumps(rows[-1]), flush=True)
            args.output.write_text(json.dumps({"rows": rows, **bench.environment()}, indent=2) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
