"""`kvweave` over a simulated slow disk: `python -m kvweave_lab.bench.serving.slow_disk BYTES_PER_S serve …`.

On a machine whose memory holds all stored KV, nothing ever waits for a disk. Here each look-up reads its entries again, unless they
are being read, as if the system had kept none of their pages. The layers of an entry arrive one after the other, at the rate of the
disk, from the moment that it is opened: so does read-ahead, which the store asks for. There is one disk, which reads whole entries
in the order in which they were opened; their headers, some kB without which nothing is known of an entry, it reads in between. Waiting
costs no processor time. Seeks, writes and SQLite are as they are.
"""

import sys
import threading
import time
from collections.abc import Sequence
from unittest.mock import patch

from kvweave.kvstore import chunk_store
from kvweave.kvstore.format import OnDamage, ParsedEntry, parse_entry
from kvweave.kvstore.layers import read_layer_ranges
from kvweave.kvstore.tiers.disk import EntryFiles
from kvweave.types import ChunkKV


class SlowDisk:
    """Says when bytes have been read. Safe to use from several threads."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._guard = threading.Lock()

    def read(self, sizes: Sequence[int]) -> list[float]:
        """Return when each of these parts will have been read, one after the other and after all that was asked for before."""
        moments = []
        with self._guard:
            self._free_s = max(self._free_s, time.perf_counter())
            for size in sizes:
                self._free_s += size / self.bytes_per_s
                moments.append(self._free_s)
        return moments


class SlowLayers:
    """The layers of one entry that is being read: a `LayerStream`. `moments` (time.perf_counter()): when each arrives."""

    def __init__(self, moments: Sequence[float]) -> None:
        self._moments = moments

    def wait_for(self, layer: int) -> None:
        """Return when this layer has arrived."""
        time.sleep(max(0.0, self._moments[layer] - time.perf_counter()))

    @property
    def layer_wait_s(self) -> float:
        """Seconds until another layer arrives, on average of those that are to come; 0 once all have."""
        now = time.perf_counter()
        left = sum(moment > now for moment in self._moments)
        return (self._moments[-1] - now) / left if left else 0.0


class SlowFiles(EntryFiles):
    """Entries that lie on the simulated disk `disk`."""

    disk: SlowDisk

    def open(self, name: str, on_damage: OnDamage = lambda reason: None) -> ParsedEntry:
        """As `EntryFiles.open`; layers of KV arrive while they are used, and anything else before this returns."""
        entry = super().open(name, on_damage)
        if not isinstance(entry.content, ChunkKV):
            time.sleep(entry.bytes / self.disk.bytes_per_s)
            return entry
        ranges = read_layer_ranges(entry.data, name)
        time.sleep(ranges.first / self.disk.bytes_per_s)
        layers = [sum(end - begin for begin, end in parts) for parts in ranges.layers]
        return parse_entry(entry.data, self.path(name), on_damage, SlowLayers(self.disk.read(layers)))

    def recent(self, name: str) -> ParsedEntry | None:
        """Return an entry that is being read."""
        entry = super().recent(name)
        if entry is None or not isinstance(entry.content, ChunkKV):
            return None
        return entry if entry.content.layer_wait_s else None


def main() -> None:
    """Run `kvweave` with the other arguments, its stores on the disk."""
    from kvweave.cli.app import main as run

    SlowFiles.disk = SlowDisk(float(sys.argv.pop(1)))
    with patch.object(chunk_store, "EntryFiles", SlowFiles):
        run()


if __name__ == "__main__":
    main()
