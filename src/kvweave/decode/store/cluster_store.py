"""Entries of clusters on disk and in memory: created, grown, loaded and gathered for attention.

A cluster is a list of pages: on disk (`ClusterPages`), in frames (`PageCache`), or both. The half-filled last page of a
growing cluster is in a frame alone, with the cluster's other frames or without them (`TailPages`). Reads are verified
(`ClusterReads`). Knows nothing of queries, or why a cluster grows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.cluster_table import ClusterKey, ClusterKeys, layer_keys, table_column
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.cluster_pages import ClusterPages
from kvweave.decode.store.cluster_reads import ClusterReads
from kvweave.decode.store.frames import gather_pages
from kvweave.decode.store.page_cache import PageCache
from kvweave.decode.store.tail_pages import TailPages
from kvweave.errors import InvalidRequest

_WORD = 2**64


class ClusterStore:
    """Clusters of all layers, in `pages` on disk, in `page_cache` and, a half-filled page of each, in `tails`."""

    def __init__(
        self,
        pages: ClusterPages,
        page_cache: PageCache,
        tails: TailPages,
        counts: DecodeCounts,
    ) -> None:
        self.pages = pages
        self.page_cache = page_cache
        self.entry_format = pages.entry_format
        self.tables = pages.tables
        self._frames = page_cache.frames
        self._counts = counts
        self.tails = tails
        self._reads = ClusterReads(pages, page_cache, tails, counts)

    # Create and grow clusters

    def new_cluster(self, layer: int, head: int) -> int:
        return self.tables[layer].new_cluster(head, self.pages.layout.allocate((layer, head)))

    def create(self, layer: int, head: int, entries: Tensor) -> int:
        """Write a new cluster of entries (n, E), and keep it in memory if nothing must be evicted; return its number."""
        cluster = self.new_cluster(layer, head)
        key, pages = (layer, head, cluster), self.entry_format.page_count(entries.shape[0])
        self._reserve(key, pages)
        self.pages.write_new(key, entries)
        self._set_content(key, entries)
        if pages + self.spare_pages <= self._frames.free_count:
            frames = self._frames.allocate(pages)
            self.entry_format.fill_pages(self._frames.pages, frames, entries)
            self.page_cache.insert(key, frames)
        return cluster

    def append(self, layer: int, head: int, cluster: int, entry: Tensor) -> None:
        """Append one entry (E,) to a cluster."""
        key, table, length = (layer, head, cluster), self.tables[layer], self.entry_format.entry_bytes
        page, slot = divmod(int(table.sizes[head, cluster]), self.entry_format.page_entries)
        frame = self._last_frame(key, page, new=slot == 0)
        self._frames.pages[frame, slot * length : (slot + 1) * length] = entry
        table.sizes[head, cluster] += 1
        checksum = int(table.checksums[head, cluster]) + self.entry_format.checksum(entry)
        table.checksums[head, cluster] = _wrapped(checksum)
        full, cached = slot + 1 == self.entry_format.page_entries, key in self.page_cache
        if full:
            self.pages.write_last([key], self._frames, [frame])
        if cached:
            self.page_cache.set_unwritten(key, not full)
        elif full:
            self._frames.free([self.tails.pop(key)])

    # Load clusters

    def prefetch(self, keys: ClusterKeys) -> None:
        """Start reading as many of these clusters as there is room for, in this order, without waiting."""
        room = self._frames.free_count + self.page_cache.evictable_frames()
        missing = self.page_cache.missing(keys)
        fitting = missing[: self._fitting(missing, room)]
        self._counts.prefetched += len(fitting)
        self._reads.start(fitting, prefetched=True)

    def load(self, keys: ClusterKeys) -> None:
        """Load these clusters into frames and wait; they stay until `page_cache.unpin_all`.

        Raises StoreError if a cluster cannot be read or does not match its checksum.
        """
        missing = self.page_cache.missing(keys)
        self.page_cache.pin(keys)
        self._reads.start(missing, prefetched=False)
        self.page_cache.pin(missing)
        self._reads.wait(keys)

    def entries(self, layer: int, head: int, cluster: int) -> Tensor:
        """Return a copy of the entries (n, E) of a cluster in frames."""
        frames = self.page_cache.frames_of((layer, head, cluster))
        pages = gather_pages(self._frames.pages, torch.tensor(frames, dtype=torch.long))
        size = int(self.tables[layer].sizes[head, cluster])
        return self.entry_format.entries_in(pages).reshape(-1, self.entry_format.entry_bytes)[:size]

    # Attend to clusters

    def start_layer(self, layer: int) -> None:
        """Start the attention of a layer: wait for all its reads, since frames being read cannot be evicted."""
        self.page_cache.current_layer = layer
        self._reads.wait_for_layer(layer)

    def capacity_pages(self) -> int:
        """Return how many pages can be attended to at once."""
        return self._frames.free_count + self.page_cache.evictable_frames() + len(self.tails)

    def locate(self, layer: int, clusters: Sequence[NDArray[np.int64]]) -> tuple[Tensor, NDArray[np.int64]]:
        """Return entry numbers (G, n) for `keys` and `values`, and the number of each head's entries (G,).

        `clusters` are those of each head, all loaded. A row is padded with any entry.
        """
        keys = layer_keys(layer, clusters)
        frames, pages = self.page_cache.all_frames(keys)
        page_entries, sizes = self.entry_format.page_entries, table_column("sizes", self.tables, keys)
        filled = np.full(len(frames), page_entries)  # entries of each page
        nonempty = pages > 0
        filled[np.cumsum(pages)[nonempty] - 1] = (sizes - (pages - 1) * page_entries)[nonempty]
        ends = np.cumsum(filled)
        numbers = np.repeat(
            frames * page_entries - (ends - filled), filled
        )  # of all heads, one after another
        numbers += np.arange(len(numbers))
        counts = np.array([self.tables[layer].sizes[head, own].sum() for head, own in enumerate(clusters)])
        index = np.full((len(clusters), counts.max()), numbers[0] if numbers.size else 0)
        for head, own in enumerate(np.split(numbers, np.cumsum(counts)[:-1])):
            index[head, : len(own)] = own
        return torch.from_numpy(index), counts

    def keys(self, numbers: Tensor) -> Tensor:
        """Return the keys (…, D) of entries that `locate` numbered."""
        return self.entry_format.keys_at(self._frames.pages, numbers)

    def values(self, numbers: Tensor) -> Tensor:
        return self.entry_format.values_at(self._frames.pages, numbers)

    def release(self, keys: ClusterKeys) -> None:
        """Record the use of these clusters, and unpin all."""
        self.page_cache.record_use(keys)
        self.page_cache.unpin_all()

    # Persist and close

    def flush(self) -> None:
        """Write all half-filled pages, which stay in memory, and sync the file to disk."""
        tails, cached = self.tails.keys(), self.page_cache.unwritten_keys()
        frames = [self.tails.frame_of(key) for key in tails]
        frames += [self.page_cache.frames_of(key)[-1] for key in cached]
        self.pages.write_last([*tails, *cached], self._frames, frames)
        self._counts.partial_pages += len(frames)
        self.pages.file.sync()

    def resident_state(self) -> dict[str, object]:
        """Return what is in memory as JSON values, for `restore_resident`; waits for reads in flight."""
        self._reads.wait_for_all()
        return {"clusters": self.page_cache.state(), "tails": self.tails.keys()}

    def restore_resident(self, state: dict[str, object]) -> None:
        """Read back what was in memory, as much as fits; all of it is on disk too. Raises StoreError."""
        tails: list[list[int]] = state["tails"]  # type: ignore[assignment]
        room_for_tails = max(0, self._frames.free_count - self.spare_pages)
        for layer, head, cluster in tails[max(0, len(tails) - room_for_tails) :]:
            (frame,) = self.page_cache.allocate(1)
            key = (layer, head, cluster)
            self.pages.read_page(key, self._frames, self.pages.page_count(key) - 1, frame)
            self.tails.add(key, frame)
        cached = [(tuple(key), facts) for key, facts in state["clusters"]]  # type: ignore[attr-defined]
        keys = [key for key, _ in cached]
        fitting = self._fitting(keys, self._frames.free_count)
        self._reads.start(keys[:fitting], prefetched=False)
        self._reads.wait(keys[:fitting])
        for key, facts in cached[:fitting]:
            self.page_cache.restore_facts(key, facts)

    def check_room(self, growth_bytes: int) -> None:
        """Raise InvalidRequest unless a cluster of each head can be attended to when other memory has grown by `growth_bytes`."""
        heads, page_bytes = self.tables[0].heads, self.entry_format.page_bytes
        needed = max(self.spare_pages, heads * self.pages.largest_pages) - (-growth_bytes // page_bytes)
        if self._frames.count < needed:
            raise InvalidRequest(
                f"resident_bytes leaves {self._frames.count} pages for clusters; {needed} are needed to attend to one per head, "
                f"and for the text to grow: allow {(needed - self._frames.count) * page_bytes} bytes more"
            )

    def close(self) -> None:
        self._reads.cancel()
        self.pages.file.close()

    # Pages and frames

    @property
    def spare_pages(self) -> int:
        """Frames that are kept free for the clusters that grow next."""
        return self.tables[0].heads

    def _fitting(self, keys: ClusterKeys, room: int) -> int:
        """Return how many of these clusters, from the first on, fit into `room` frames."""
        counts = self._reads.disk_pages(keys, table_column("sizes", self.tables, keys))
        return int((np.cumsum(counts) <= room).sum())

    def _reserve(self, key: ClusterKey, pages: int) -> None:
        """Make room on disk for a cluster's pages."""
        self.pages.reserve(key, pages)

    def _set_content(self, key: ClusterKey, entries: Tensor) -> None:
        layer, head, cluster = key
        self.tables[layer].sizes[head, cluster] = entries.shape[0]
        self.tables[layer].checksums[head, cluster] = self.entry_format.checksum(entries)

    def _last_frame(self, key: ClusterKey, page: int, *, new: bool) -> int:
        """Return the frame of a cluster's last page, for writing; `new`: the page does not exist yet."""
        if new:
            self._reserve(key, page + 1)
            (frame,) = self.page_cache.allocate(1)
            self._frames.pages[frame] = 0
        elif key in self.page_cache:
            self._reads.wait([key])
            frame = self.page_cache.frames_of(key)[-1]
        elif key in self.tails:
            frame = self.tails.pop(key)  # added again below, as the latest
        else:
            (frame,) = self.page_cache.allocate(1)
            self.pages.read_page(key, self._frames, page, frame)
        if key in self.page_cache:
            self.page_cache.record_update(key, frame if new else None)
        else:
            self.tails.add(key, frame)
        return frame


def _wrapped(word: int) -> int:
    """Return a sum as a signed 64-bit word."""
    return (word + _WORD // 2) % _WORD - _WORD // 2
