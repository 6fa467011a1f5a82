"""Clusters' entries on flash and in memory: written, grown, fetched ahead, gathered for attention.

A cluster is a list of pages, on flash (`cluster_pages.py`), in frames, or both; the last, half filled one of a cluster that
grows is in a frame alone, where the others are or without them (`tails.py`). What is read is checked (`cluster_reads.py`). Knows nothing of centroids, queries
or of why a cluster grows.
"""

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.table import Key, Keys, column, keys_of, named
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.pages import ClusterPages
from kvweave.decode.disk.reads import ClusterReads
from kvweave.decode.disk.tail_pages import Tails
from kvweave.decode.page_cache.frames import Frames, rows_of
from kvweave.decode.page_cache.page_cache import DevicePages, Residents
from kvweave.errors import InvalidRequest

_WORD = 2**64


class StoredClusters:
    """The clusters of all layers, in `pages` on flash and in frames. `tail_pages`: half filled ones that a head keeps of
    clusters that are not in memory.

    With `device`, clusters are attended to there, and read into frames only where the device has no copy.
    """

    def __init__(
        self,
        pages: ClusterPages,
        residents: Residents[Frames],
        counts: DecodeCounts,
        *,
        tail_pages: int,
        device: DevicePages | None = None,
    ) -> None:
        self.device = device
        self.pages = pages
        self.form = pages.form
        self.tables = pages.tables
        self.residents = residents
        self._frames = residents.frames
        self._counts = counts
        self._tails = Tails(pages, residents.frames, counts, tail_pages)
        self._reads = ClusterReads(pages, residents, self._tails, counts)
        # These hold the residents: were they held by them, all frames would stay alive.
        tails, reads = weakref.proxy(self._tails), weakref.proxy(self._reads)
        residents.outside = lambda: len(tails)
        residents.finish_reads = lambda: reads.wait_for_all()
        residents.give_outside = lambda: tails.write_any()
        residents.keep_last = lambda key, frame: tails.keep(key, frame)

    # Making clusters

    def open(self, layer: int, head: int) -> int:
        """A new cluster without entries; returns its number."""
        return self.tables[layer].open(head, self.pages.places.take((layer, head)))

    def create(self, layer: int, head: int, entries: Tensor) -> int:
        """A new cluster of entries (n, E), written to flash and kept in memory if nothing has to leave for it; its number."""
        cluster = self.open(layer, head)
        key, pages = (layer, head, cluster), self.form.pages(entries.shape[0])
        self._reserve(key, pages)
        self.pages.write_new(key, entries)
        self._note(layer, head, cluster, entries)
        if pages + self._split_pages <= self._frames.free:
            frames = self._frames.take(pages)
            self.form.lay_out(self._frames.pages, frames, entries)
            self.residents.put(key, frames)
        return cluster

    def replace(self, layer: int, head: int, cluster: int, entries: Tensor) -> None:
        """Give a cluster other entries (n, E), as a split does; it is in memory afterwards, its last page unwritten."""
        key = (layer, head, cluster)
        self._forget(key)
        count = entries.shape[0]
        pages = self.form.pages(count)
        self._reserve(key, pages)
        frames = self.residents.room(pages)
        self.form.lay_out(self._frames.pages, frames, entries)
        self._note(layer, head, cluster, entries)
        whole = count // self.form.per_page
        self.pages.write_whole(key, self._frames, frames[:whole])
        self.residents.put(key, frames, unwritten=whole < pages)
        self.residents.update(key)

    def append(self, layer: int, head: int, cluster: int, entry: Tensor) -> None:
        """Add one entry (E,) to a cluster."""
        key, table = (layer, head, cluster), self.tables[layer]
        page, slot = divmod(int(table.sizes[head, cluster]), self.form.per_page)
        frame = self._last_page(key, page, fresh=slot == 0)
        self._frames.pages[frame, slot * self.form.bytes : (slot + 1) * self.form.bytes] = entry
        table.sizes[head, cluster] += 1
        table.checksums[head, cluster] = _wrapped(
            int(table.checksums[head, cluster]) + self.form.checksum(entry)
        )
        full, here = slot + 1 == self.form.per_page, key in self.residents
        if full:
            self.pages.write_last([key], self._frames, [frame])
        if here:
            self.residents.set_unwritten(key, not full)
        elif full:
            self._frames.give([self._tails.take(key)])
        if self.device is not None:
            self.device.forget(key)

    # Bringing clusters into memory

    def fetch_ahead(self, keys: Keys) -> None:
        """Start reading as many of these clusters as there is room for, in this order, without waiting."""
        room = self._frames.free + self.residents.evictable()
        missing = self.residents.missing(keys if self.device is None else self.device.residents.missing(keys))
        fitting = missing[: self._fitting(missing, room)]
        self._counts.prefetched += len(fitting)
        self._reads.start(fitting, ahead=True)

    def ensure(self, keys: Keys) -> None:
        """Have these clusters in memory, pinned until `residents.release`; reads what is missing and waits for it.

        Raises StoreError if something cannot be read or is not what was written.
        """
        missing = self.residents.missing(keys)
        self.residents.pin(keys)
        self._reads.start(missing, ahead=False)
        self.residents.pin(missing)
        self.wait(keys)

    def ready(self, keys: Keys) -> tuple[int, int]:
        """How many clusters need not be read since they were asked for before, and how many as they were fetched ahead."""
        away = keys if self.device is None else self.device.residents.missing(keys)
        stayed, ahead = self.residents.present(away)
        return len(keys) - len(away) + stayed, ahead

    def bring(self, keys: Keys) -> None:
        """Have these clusters where they are attended to, pinned until `let_go`; as `ensure` in all else."""
        if self.device is None:
            self.ensure(keys)
            return
        missing = self.device.missing(keys)
        self.ensure(missing)
        for key in named(missing):
            frames = self.residents.frames_of(key)
            self.device.copy(key, self._frames.pages, frames)
            self._counts.copied_bytes += len(frames) * self.form.page_bytes

    def let_go(self, keys: Keys) -> None:
        """These have been attended to, and nothing needs to stay."""
        self.residents.use(keys)
        self.residents.release()
        if self.device is not None:
            self.device.residents.use(keys)
            self.device.residents.release()

    def room(self) -> int:
        """Pages that can be attended to at once: half filled ones that are here alone are written if need be."""
        room = self._frames.free + self.residents.evictable() + len(self._tails)
        return room if self.device is None else min(room, self.device.residents.frames.count)

    def wait(self, keys: Keys) -> None:
        """Wait until what is being read of these clusters is there, and check it."""
        self._reads.wait(keys)

    def come_to(self, layer: int) -> None:
        """A layer attends now. Waits for all that is being read of it, wanted or not: that can make room for nothing."""
        self.residents.turn = layer
        if self.device is not None:
            self.device.residents.row, self.device.residents.turn = self.residents.row, layer
        self._reads.wait_for_layer(layer)

    def in_memory(self, layer: int, head: int, cluster: int) -> bool:
        """Whether all of a cluster is in memory, or on its way there."""
        key = (layer, head, cluster)
        return key in self.residents or self.pages.pages_of(key) == int(key in self._tails)

    def entries(self, layer: int, head: int, cluster: int) -> Tensor:
        """A copy of a cluster's entries (n, E); it must be in memory."""
        frames = self.residents.frames_of((layer, head, cluster))
        pages = rows_of(self._frames.pages, torch.tensor(frames, dtype=torch.long))
        size = int(self.tables[layer].sizes[head, cluster])
        return self.form.entries_in(pages).reshape(-1, self.form.bytes)[:size]

    def place(self, layer: int, chosen: Sequence[NDArray[np.int64]]) -> tuple[Tensor, NDArray[np.int64]]:
        """Where the entries of each head's `chosen` clusters are, all brought: numbers (G, n) for `keys` and `values`.

        And how many each head has, (G,): what is behind them in its row is any entry.
        """
        keys = keys_of(layer, chosen)
        frames, pages = self._attended(keys)
        per_page, sizes = self.form.per_page, column("sizes", self.tables, keys)
        filled = np.full(len(frames), per_page)  # entries of each page
        some = pages > 0
        filled[np.cumsum(pages)[some] - 1] = (sizes - (pages - 1) * per_page)[some]
        ends = np.cumsum(filled)
        numbers = np.repeat(frames * per_page - (ends - filled), filled)  # all heads', one after the other
        numbers += np.arange(len(numbers))
        counts = np.array([self.tables[layer].sizes[head, own].sum() for head, own in enumerate(chosen)])
        index = np.full((len(chosen), counts.max()), numbers[0] if numbers.size else 0)
        for head, own in enumerate(np.split(numbers, np.cumsum(counts)[:-1])):
            index[head, : len(own)] = own
        return torch.from_numpy(index), counts

    def keys(self, numbers: Tensor) -> Tensor:
        """The keys (…, D) of entries that `place` gave the numbers of."""
        return self.form.keys_at(self._pages, numbers.to(self._pages.device))

    def values(self, numbers: Tensor) -> Tensor:
        """Their values (…, D)."""
        return self.form.values_at(self._pages, numbers.to(self._pages.device))

    def flush(self) -> None:
        """Write all half filled pages, which stay in memory, and wait until everything is on the disk."""
        alone, here = self._tails.keys(), self.residents.unwritten()
        frames = [*map(self._tails.frame_of, alone), *(self.residents.frames_of(key)[-1] for key in here)]
        self.pages.write_last([*alone, *here], self._frames, frames)
        self._counts.partial_pages += len(frames)
        self.pages.file.sync()

    def resident_state(self) -> dict[str, object]:
        """What is in memory, for `restore_resident`, as JSON values; waits for reads under way."""
        self._reads.wait_for_all()
        return {"clusters": self.residents.state(), "tails": self._tails.keys()}

    def restore_resident(self, state: dict[str, object]) -> None:
        """Read back what was in memory, as far as there is room: all of it is on flash too. Raises StoreError."""
        tails: list[list[int]] = state["tails"]  # type: ignore[assignment]
        room_for_tails = max(0, self._frames.free - self._split_pages)
        for layer, head, cluster in tails[max(0, len(tails) - room_for_tails) :]:
            (frame,) = self.residents.room(1)
            key = (layer, head, cluster)
            self.pages.read(key, self._frames, self.pages.pages_of(key) - 1, frame)
            self._tails.keep(key, frame)
        known = [(tuple(key), facts) for key, facts in state["clusters"]]  # type: ignore[attr-defined]
        keys = [key for key, _ in known]
        fitting = self._fitting(keys, self._frames.free)
        self._reads.start(keys[:fitting], ahead=False)
        self.wait(keys[:fitting])
        for key, facts in known[:fitting]:
            self.residents.recall(key, facts)

    def close(self) -> None:
        """Stop reading and close the file."""
        self._reads.cancel()
        self.pages.file.close()

    # Pages and frames

    def _last_page(self, key: Key, page: int, *, fresh: bool) -> int:
        """The frame of a cluster's last page, to be written to; `fresh`: the page does not exist yet."""
        if fresh:
            self._reserve(key, page + 1)
            (frame,) = self.residents.room(1)
            self._frames.pages[frame] = 0
        elif key in self.residents:
            self.wait([key])
            frame = self.residents.frames_of(key)[-1]
        elif key in self._tails:
            frame = self._tails.take(key)  # and kept again: it is the latest
        else:
            (frame,) = self.residents.room(1)
            self.pages.read(key, self._frames, page, frame)
        if key in self.residents:
            self.residents.update(key, frame if fresh else None)
        else:
            self._tails.keep(key, frame)
        return frame

    def _forget(self, key: Key) -> None:
        self.wait([key])
        if key in self.residents:
            self._frames.give(self.residents.drop(key))
        if self.device is not None:
            self.device.forget(key)
        if key in self._tails:
            self._frames.give([self._tails.take(key)])

    def _attended(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Frames of clusters where they are attended to, and how many each has."""
        return (self.residents if self.device is None else self.device.residents).all_frames(keys)

    @property
    def _pages(self) -> Tensor:
        """The memory where clusters are attended to."""
        return self._frames.pages if self.device is None else self.device.pages

    def _fitting(self, keys: Keys, room: int) -> int:
        """How many of these clusters, from the first on, find room in so many frames."""
        counts = self._reads.on_flash(keys, column("sizes", self.tables, keys))
        return int((np.cumsum(counts) <= room).sum())

    def _reserve(self, key: Key, pages: int) -> None:
        """Have room on flash for so many pages of a cluster."""
        moves = self.pages.reserve(key, pages)
        if moves:
            self._reads.wait_for_all()
            self.pages.move(moves)

    def _note(self, layer: int, head: int, cluster: int, entries: Tensor) -> None:
        table = self.tables[layer]
        table.sizes[head, cluster] = entries.shape[0]
        table.checksums[head, cluster] = self.form.checksum(entries)

    @property
    def _split_pages(self) -> int:
        """What the largest cluster takes when it is split: both halves must be in memory at once."""
        return 2 * self.pages.largest_pages + 2

    def check_room(self, growth_bytes: int = 0) -> None:
        """Raise InvalidRequest unless the largest cluster can be split, and one of every head attended to.

        `growth_bytes` is what a split needs besides.
        """
        heads = self.tables[0].heads
        needed = max(
            self._split_pages - (-growth_bytes // self.form.page_bytes), heads * self.pages.largest_pages
        )
        if self._frames.count < needed:
            raise InvalidRequest(
                f"resident_bytes leaves {self._frames.count} pages for clusters; {needed} are needed to split one and to attend"
                f" to one per head: allow {(needed - self._frames.count) * self.form.page_bytes} bytes more"
            )
        least = 2 * heads * self.pages.largest_pages  # the largest portion of all heads
        if self.device is not None and len(self.device.pages) < least:
            raise InvalidRequest(
                f"device_bytes holds {len(self.device.pages)} pages; {least} are needed to attend to one cluster per head:"
                f" allow {(least - len(self.device.pages)) * self.form.page_bytes} bytes more"
            )


def _wrapped(word: int) -> int:
    """A sum as a signed 64-bit word."""
    return (word + _WORD // 2) % _WORD - _WORD // 2
