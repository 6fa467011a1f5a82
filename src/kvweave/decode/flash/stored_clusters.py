"""Clusters' entries on flash and in memory: written, grown, fetched ahead, gathered for attention.

A cluster is a list of pages. Those on flash may be in frames too; the last, half filled one is kept in a frame until
it is full or colder than the others of its head, so that flash sees whole pages. What is read is checked against the
cluster's checksum. Knows nothing of centroids, queries or of why a cluster grows.
"""

import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.decode.clusters.table import Key, column
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.flash.cluster_pages import ClusterPages
from kvweave.decode.residency.device_pages import DevicePages
from kvweave.decode.residency.frames import Frames, rows_of
from kvweave.decode.residency.residents import Residents
from kvweave.errors import InvalidRequest, StoreError

_WORD = 2**64
_CHECKED_PAGES = 64  # that are copied at once to be checked


@dataclass(frozen=True, slots=True, eq=False)
class _Loading:
    """Clusters being read together."""

    keys: tuple[Key, ...]
    reads: "tuple[Future[None], ...]"


class StoredClusters:
    """The clusters of all layers, in `pages` on flash and in frames. `tail_pages`: half filled ones a head keeps.

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
        self._tail_pages = tail_pages
        self._tails: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # owner → cluster → frame
        self._loading: dict[Key, _Loading] = {}
        own = weakref.proxy(self)  # this holds the residents: one that they hold would keep all frames alive
        residents.outside = lambda: sum(map(len, own._tails.values()))
        residents.finish_reads = lambda: own._finish_all()
        residents.give_outside = lambda: own._flush_any_tail()

    # Making clusters

    def open(self, layer: int, head: int) -> int:
        """A new cluster without entries; returns its number."""
        return self.tables[layer].open(head, self.pages.places.take((layer, head)))

    def create(self, layer: int, head: int, entries: Tensor) -> int:
        """A new cluster of entries (n, E), written to flash and not kept in memory; returns its number."""
        cluster = self.open(layer, head)
        self._reserve((layer, head, cluster), self.form.pages(entries.shape[0]))
        self.pages.write_new((layer, head, cluster), entries)
        self._note(layer, head, cluster, entries)
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
        self.pages.write(key, self._frames, frames[:whole], 0)
        self.residents.put(key, frames[:whole])
        self.residents.update(key)
        if whole < pages:
            self._keep_tail(key, frames[-1])

    def append(self, layer: int, head: int, cluster: int, entry: Tensor) -> None:
        """Add one entry (E,) to a cluster."""
        key, table = (layer, head, cluster), self.tables[layer]
        page, slot = divmod(int(table.sizes[head, cluster]), self.form.per_page)
        frame = self._tail_of(key, page, fresh=slot == 0)
        self._frames.pages[frame, slot * self.form.bytes : (slot + 1) * self.form.bytes] = entry
        table.sizes[head, cluster] += 1
        table.checksums[head, cluster] = _wrapped(
            int(table.checksums[head, cluster]) + self.form.checksum(entry)
        )
        if slot + 1 == self.form.per_page:
            del self._tails[layer, head][cluster]
            self.pages.write(key, self._frames, [frame], page)
            self._keep_clean(key, frame)
        self.residents.update(key)
        if self.device is not None:
            self.device.forget(key)

    # Bringing clusters into memory

    def fetch_ahead(self, keys: Sequence[Key]) -> None:
        """Start reading as many of these clusters as there is room for, in this order, without waiting."""
        room = self._frames.free + self.residents.evictable()
        missing = self.residents.missing(keys if self.device is None else self.device.residents.missing(keys))
        counts = self._on_flash(missing, column("sizes", self.tables, missing))
        fitting = missing[: int((np.cumsum(counts) <= room).sum())]
        self._counts.prefetched += len(fitting)
        self._fetch(fitting, ahead=True)

    def ensure(self, keys: Sequence[Key]) -> None:
        """Have these clusters in memory, pinned until `residents.release`; reads what is missing and waits for it.

        Raises StoreError if something cannot be read or is not what was written.
        """
        missing = self.residents.missing(keys)
        self.residents.pin(keys)
        self._fetch(missing, ahead=False)
        self.wait(keys)

    def ready(self, keys: Sequence[Key]) -> tuple[int, int]:
        """How many clusters need not be read since they were asked for before, and how many as they were fetched ahead."""
        away = keys if self.device is None else self.device.residents.missing(keys)
        stayed, ahead = self.residents.present(away)
        return len(keys) - len(away) + stayed, ahead

    def bring(self, keys: Sequence[Key]) -> None:
        """Have these clusters where they are attended to, pinned until `let_go`; as `ensure` in all else."""
        if self.device is None:
            self.ensure(keys)
            return
        missing = self.device.missing(keys)
        self.ensure(missing)
        for key in missing:
            frames = self._frames_of(key)
            self.device.copy(key, self._frames.pages, frames)
            self._counts.copied_bytes += len(frames) * self.form.page_bytes

    def let_go(self, keys: Sequence[Key]) -> None:
        """These have been attended to, and nothing needs to stay."""
        self.residents.use(keys)
        self.residents.release()
        if self.device is not None:
            self.device.residents.use(keys)
            self.device.residents.release()

    def room(self) -> int:
        """Pages that can be attended to at once."""
        room = self._frames.free + self.residents.evictable()
        return room if self.device is None else min(room, self.device.residents.frames.count)

    def wait(self, keys: Sequence[Key]) -> None:
        """Wait until what is being read of these clusters is there, and check it."""
        for loading in {self._loading[key] for key in keys if key in self._loading}:
            self._finish(loading)

    def come_to(self, layer: int) -> None:
        """A layer attends now. Waits for all that is being read of it, wanted or not: that can make room for nothing."""
        self.residents.turn = layer
        if self.device is not None:
            self.device.residents.row, self.device.residents.turn = self.residents.row, layer
        self.wait([key for key in self._loading if key[0] == layer])

    def in_memory(self, layer: int, head: int, cluster: int) -> bool:
        """Whether all of a cluster is in memory, or on its way there."""
        key = (layer, head, cluster)
        return key in self.residents or not self._flash_pages(key)

    def entries(self, layer: int, head: int, cluster: int) -> Tensor:
        """A copy of a cluster's entries (n, E); it must be in memory."""
        key = (layer, head, cluster)
        pages = rows_of(self._frames.pages, torch.tensor(self._frames_of(key), dtype=torch.long))
        size = int(self.tables[layer].sizes[head, cluster])
        return self.form.entries_in(pages).reshape(-1, self.form.bytes)[:size]

    def place(self, layer: int, chosen: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """The frames (G, P) of each head's `chosen` clusters, all brought, for `gather`, and which of what that gathers
        are entries (G, 1, n)."""
        frames_of = self._frames_of if self.device is None else self.device.residents.frames_of
        frames = [
            list(chain.from_iterable(frames_of((layer, head, c)) for c in clusters))
            for head, clusters in enumerate(chosen)
        ]
        most = max(map(len, frames))
        filler = next(
            (own[0] for own in frames if own), 0
        )  # any that holds numbers: hidden, but multiplied by 0
        padded = [own + [filler] * (most - len(own)) for own in frames]
        index = torch.tensor(padded, dtype=torch.long)  # (G, P)
        valid = torch.zeros(len(frames), most, dtype=torch.long)
        for head, clusters in enumerate(chosen):
            filled = self._filled(self.tables[layer].sizes[head, list(clusters)])
            valid[head, : len(filled)] = torch.from_numpy(filled)
        visible = torch.arange(self.form.per_page) < valid[..., None]  # (G, P, per page)
        return index, visible.flatten(1)[:, None]

    def gather(self, index: Tensor) -> Tensor:
        """The entries (G, n, E) in the frames that `place` gave, and what fills pages up."""
        pages = self._frames.pages if self.device is None else self.device.pages
        return self.form.entries_in(rows_of(pages, index)).flatten(1, 2)

    def flush(self) -> None:
        """Write all half filled pages and wait until everything is on the disk."""
        for owner, tails in self._tails.items():
            for cluster in list(tails):
                self._flush_tail(owner, cluster)
        self.pages.file.sync()

    def resident_state(self) -> dict[str, object]:
        """What is in memory, for `restore_resident`, as JSON values; waits for reads under way."""
        self._finish_all()
        tails = [[*owner, cluster] for owner, own in self._tails.items() for cluster in own]
        return {"clusters": self.residents.state(), "tails": tails}

    def restore_resident(self, state: dict[str, object]) -> None:
        """Read back what was in memory, as far as there is room: all of it is on flash too. Raises StoreError."""
        tails: list[list[int]] = state["tails"]  # type: ignore[assignment]
        room_for_tails = max(0, self._frames.free - self._split_pages)
        for layer, head, cluster in tails[max(0, len(tails) - room_for_tails) :]:
            (frame,) = self.residents.room(1)
            key = (layer, head, cluster)
            self.pages.read(key, self._frames, self.pages.pages_of(key) - 1, frame)
            self._keep_tail(key, frame)
        known = [(tuple(key), facts) for key, facts in state["clusters"]]  # type: ignore[attr-defined]
        fitting, room = [], self._frames.free
        for key, facts in known:
            room -= self._flash_pages(key)
            if room >= 0:
                fitting.append((key, facts))
        keys = [key for key, _ in fitting]
        self._fetch(keys, ahead=False)
        self.wait(keys)
        for key, facts in fitting:
            self.residents.recall(key, facts)

    def close(self) -> None:
        """Stop reading and close the file."""
        for loading in set(self._loading.values()):
            for read in loading.reads:
                read.cancel()
        self.pages.file.close()

    # Pages and frames

    def _fetch(self, missing: Sequence[Key], *, ahead: bool) -> None:
        if not missing:
            return
        sizes = column("sizes", self.tables, missing)
        counts = self._on_flash(missing, sizes)
        while self._frames.free < counts.sum():
            self.residents.make_free(int(counts.sum()))
            counts = self._on_flash(missing, sizes)  # more if a last page had to leave for it
        frames = self._frames.take(int(counts.sum()))
        at = 0
        for key, count in zip(missing, counts.tolist(), strict=True):
            self.residents.put(key, frames[at : at + count], ahead=ahead)
            at += count
        runs = self.pages.runs(self.pages.numbers(missing, counts), np.array(frames, np.int64), self._frames)
        loading = _Loading(tuple(missing), tuple(self.pages.file.read(runs)))
        self._counts.cluster_reads += len(runs)
        self._counts.entries_read += int(np.minimum(sizes, counts * self.form.per_page).sum())
        self._loading.update(dict.fromkeys(missing, loading))
        self.residents.busy.update(missing)

    def _finish_all(self) -> None:
        self.wait(list(self._loading))

    def _finish(self, loading: _Loading) -> None:
        failure: BaseException | None = None
        for read in loading.reads:
            failure = read.exception() or failure  # all must have ended before frames are given to others
        for key in loading.keys:
            self._loading.pop(key, None)
        self.residents.busy.difference_update(loading.keys)
        damaged = None if failure else self._damaged(loading.keys)
        if failure is None and damaged is None:
            return
        for key in loading.keys:
            self._frames.give(self.residents.drop(key))
        if failure is not None:
            raise copy(failure) from failure  # see `page_file.finish`
        raise StoreError(f"cluster {damaged} was read and is not what was written; start again from the text")

    def _damaged(self, keys: Sequence[Key]) -> Key | None:
        """The first cluster whose pages do not sum up to its checksum."""
        held = [self._frames_of(key) for key in keys]
        frames = torch.tensor(list(chain.from_iterable(held)), dtype=torch.long)
        pages = self._frames.pages
        sums = [  # unused room in a page is zero
            rows_of(pages, some).view(torch.int64).numpy().sum(1) for some in frames.split(_CHECKED_PAGES)
        ]
        running = np.concatenate(
            [[0], np.cumsum(np.concatenate(sums))]
        )  # modulo 2⁶⁴, as their differences are
        ends = np.cumsum(np.fromiter(map(len, held), np.int64, len(held)))
        found = running[ends] - running[np.concatenate([[0], ends[:-1]])]
        wrong = np.flatnonzero(found != column("checksums", self.tables, keys))
        return keys[wrong[0]] if wrong.size else None

    def _tail_of(self, key: Key, page: int, *, fresh: bool) -> int:
        """The frame of a cluster's last page, to be written to; `fresh`: the page does not exist yet."""
        layer, head, cluster = key
        tails = self._tails[layer, head]
        if fresh:
            self._reserve(key, page + 1)
            (frame,) = self.residents.room(1)
            self._frames.pages[frame] = 0
        elif cluster in tails:
            frame = tails.pop(cluster)
        elif key in self.residents:
            self.wait([key])
            frame = self.residents.frames_of(key).pop()
        else:
            (frame,) = self.residents.room(1)
            self.pages.read(key, self._frames, page, frame)
        self._keep_tail(key, frame)
        return frame

    def _keep_tail(self, key: Key, frame: int) -> None:
        layer, head, cluster = key
        tails = self._tails[layer, head]
        tails[cluster] = frame  # the latest stands last
        if len(tails) > self._tail_pages:
            self._flush_tail((layer, head), next(iter(tails)))

    def _flush_tail(self, owner: tuple[int, int], cluster: int) -> None:
        key = (*owner, cluster)
        frame = self._tails[owner].pop(cluster)
        page = self.pages.pages_of(key) - 1
        self._counts.partial_pages += 1
        self.pages.write(key, self._frames, [frame], page)
        self._keep_clean(key, frame)

    def _flush_any_tail(self) -> bool:
        """Write one half filled page of whoever has the most, the oldest; False if there is none."""
        owner = max(self._tails, key=lambda own: len(self._tails[own]), default=None)
        if owner is None or not self._tails[owner]:
            return False
        self._flush_tail(owner, next(iter(self._tails[owner])))
        return True

    def _keep_clean(self, key: Key, frame: int) -> None:
        """A last page that flash holds now: part of the cluster where that is in memory, else let go."""
        if key in self.residents:
            self.residents.frames_of(key).append(frame)
            self.residents.update(key)
        else:
            self._frames.give([frame])

    def _forget(self, key: Key) -> None:
        layer, head, cluster = key
        self.wait([key])
        if key in self.residents:
            self._frames.give(self.residents.drop(key))
        if self.device is not None:
            self.device.forget(key)
        if cluster in self._tails[layer, head]:
            self._frames.give([self._tails[layer, head].pop(cluster)])

    def _frames_of(self, key: Key) -> list[int]:
        layer, head, cluster = key
        own = self.residents.frames_of(key) if key in self.residents else []
        tail = self._tails[layer, head].get(cluster)
        return own if tail is None else [*own, tail]

    def _flash_pages(self, key: Key) -> int:
        """Pages of a cluster that lie on flash as they should be."""
        layer, head, cluster = key
        return self.pages.pages_of(key) - (cluster in self._tails[layer, head])

    def _on_flash(self, keys: Sequence[Key], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """`_flash_pages` of clusters of these sizes."""
        waiting = [cluster in self._tails[layer, head] for layer, head, cluster in keys]
        return -(-sizes // self.form.per_page) - np.array(waiting, np.int64)

    def _filled(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries on each page of clusters of these sizes, one after the other."""
        pages = -(-sizes // self.form.per_page)
        filled = np.full(int(pages.sum()), self.form.per_page)
        some = pages > 0
        filled[np.cumsum(pages)[some] - 1] = (sizes - (pages - 1) * self.form.per_page)[some]
        return filled

    def _reserve(self, key: Key, pages: int) -> None:
        """Have room on flash for so many pages of a cluster."""
        moves = self.pages.reserve(key, pages)
        if moves:
            self._finish_all()
            self.pages.move(moves)

    def _note(self, layer: int, head: int, cluster: int, entries: Tensor) -> None:
        table = self.tables[layer]
        table.sizes[head, cluster] = entries.shape[0]
        table.checksums[head, cluster] = self.form.checksum(entries)

    @property
    def _split_pages(self) -> int:
        """What the largest cluster takes when it is split: both halves must be in memory at once."""
        return 2 * self.pages.largest_pages + 2

    def check_room(self) -> None:
        """Raise InvalidRequest unless the largest cluster can be split, and one of every head attended to."""
        heads = self.tables[0].heads
        needed = max(self._split_pages, heads * self.pages.largest_pages)
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
