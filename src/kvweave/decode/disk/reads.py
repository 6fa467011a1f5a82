"""Clusters on their way from flash into frames, several at once; each is checked when it is there.

Frames that are being read into must not be given to others: whoever is being read stays until its reads have ended.
"""

from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvweave.decode.clusters.table import Key, Keys, as_keys, column, named
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.pages import ClusterPages
from kvweave.decode.disk.tail_pages import Tails
from kvweave.decode.page_cache.frames import Frames, rows_of
from kvweave.decode.page_cache.page_cache import Residents
from kvweave.errors import StoreError

_CHECKED_PAGES = 64  # that are copied at once to be checked


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Clusters (n, 3) that are read together."""

    keys: NDArray[np.int64]
    reads: "tuple[Future[None], ...]"


class ClusterReads:
    """What is being read of `pages` for `residents`; `tails` has what is not on flash."""

    def __init__(
        self, pages: ClusterPages, residents: Residents[Frames], tails: Tails, counts: DecodeCounts
    ) -> None:
        self._pages = pages
        self._residents = residents
        self._tails = tails
        self._counts = counts
        self._under_way: dict[Key, _Reading] = {}

    def start(self, missing: Keys, *, ahead: bool) -> None:
        """Make room for these clusters and begin to read them; `ahead`: nobody asked for them yet."""
        missing = as_keys(missing)
        if not len(missing):
            return
        pages, residents, frames = self._pages, self._residents, self._residents.frames
        sizes = column("sizes", pages.tables, missing)
        counts = self.on_flash(missing, sizes)
        while frames.free < counts.sum():
            residents.make_free(int(counts.sum()))
            counts = self.on_flash(missing, sizes)  # more if a last page had to leave for it
        taken = frames.take(int(counts.sum()))
        reading = _Reading(missing, self._read(missing, counts, taken))
        self._counts.entries_read += int(np.minimum(sizes, counts * pages.form.per_page).sum())
        at = 0
        for key, count in zip(named(missing), counts.tolist(), strict=True):
            own = taken[at : at + count]
            at += count
            if unwritten := key in self._tails:
                own.append(self._tails.take(key))
            residents.put(key, own, ahead=ahead, unwritten=unwritten)
            self._under_way[key] = reading
        residents.begin_reads(missing)

    def wait(self, keys: Keys) -> None:
        """Wait until what is being read of these clusters is there, and check it. Raises StoreError."""
        if self._under_way:
            under_way = named(self._residents.being_read(keys))
            for reading in dict.fromkeys(self._under_way[key] for key in under_way):
                self._finish(reading)

    def wait_for_layer(self, layer: int) -> None:
        """As `wait` for all of a layer's clusters."""
        self.wait([key for key in self._under_way if key[0] == layer])

    def wait_for_all(self) -> None:
        """As `wait` for whatever is under way."""
        self.wait(list(self._under_way))

    def cancel(self) -> None:
        """Begin no more of them; what is under way ends by itself."""
        for reading in set(self._under_way.values()):
            for read in reading.reads:
                read.cancel()

    def on_flash(self, keys: Keys, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that must be read of clusters of these sizes that are not in memory, (n,)."""
        return self._pages.form.pages(sizes) - self._tails.holds(keys)

    def _read(
        self, keys: NDArray[np.int64], counts: NDArray[np.int64], frames: list[int]
    ) -> "tuple[Future[None], ...]":
        """Begin to read the first `counts` (n,) pages of clusters into frames."""
        pages = self._pages
        runs = pages.runs(pages.numbers(keys, counts), np.array(frames, np.int64), self._residents.frames)
        self._counts.cluster_reads += len(runs)
        return tuple(pages.file.read(runs))

    def _finish(self, reading: _Reading) -> None:
        failure: BaseException | None = None
        for read in reading.reads:
            failure = read.exception() or failure  # all must have ended before frames are given to others
        keys = named(reading.keys)
        for key in keys:
            self._under_way.pop(key, None)
        self._residents.end_reads(reading.keys)
        damaged = None if failure else self._damaged(keys)
        if failure is None and damaged is None:
            return
        for key in keys:
            self._residents.frames.give(self._residents.drop(key))
        if failure is not None:
            raise copy(failure) from failure  # see `page_file.finish`
        raise StoreError(f"cluster {damaged} was read and is not what was written; start again from the text")

    def _damaged(self, keys: list[Key]) -> Key | None:
        """The first cluster whose pages do not sum up to its checksum."""
        frames, counts = self._residents.all_frames(keys)
        pages = self._residents.frames.pages
        sums = [  # unused room in a page is zero
            rows_of(pages, some).view(torch.int64).numpy().sum(1)
            for some in torch.from_numpy(frames).split(_CHECKED_PAGES)
        ]
        running = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sums]))  # modulo 2⁶⁴, as differences are
        ends = np.cumsum(counts)
        found = running[ends] - running[ends - counts]
        wrong = np.flatnonzero(found != column("checksums", self._pages.tables, keys))
        return keys[wrong[0]] if wrong.size else None
