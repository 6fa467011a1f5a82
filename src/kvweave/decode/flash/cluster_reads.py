"""Clusters on their way from flash into frames, several at once; each is checked when it is there.

Frames that are being read into must not be given to others: whoever is `busy` stays until its reads have ended.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from kvweave.decode.clusters.table import Key, column
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.flash.cluster_pages import ClusterPages
from kvweave.decode.flash.tails import Tails
from kvweave.decode.residency.frames import Frames, rows_of
from kvweave.decode.residency.residents import Residents
from kvweave.errors import StoreError

_CHECKED_PAGES = 64  # that are copied at once to be checked


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """Clusters that are read together."""

    keys: tuple[Key, ...]
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

    def start(self, missing: Sequence[Key], *, ahead: bool) -> None:
        """Make room for these clusters and begin to read them; `ahead`: nobody asked for them yet."""
        if not missing:
            return
        pages, residents, frames = self._pages, self._residents, self._residents.frames
        sizes = column("sizes", pages.tables, missing)
        counts = self._tails.on_flash(missing, sizes)
        while frames.free < counts.sum():
            residents.make_free(int(counts.sum()))
            counts = self._tails.on_flash(missing, sizes)  # more if a last page had to leave for it
        taken = frames.take(int(counts.sum()))
        at = 0
        for key, count in zip(missing, counts.tolist(), strict=True):
            residents.put(key, taken[at : at + count], ahead=ahead)
            at += count
        runs = pages.runs(pages.numbers(missing, counts), np.array(taken, np.int64), frames)
        reading = _Reading(tuple(missing), tuple(pages.file.read(runs)))
        self._counts.cluster_reads += len(runs)
        self._counts.entries_read += int(np.minimum(sizes, counts * pages.form.per_page).sum())
        self._under_way.update(dict.fromkeys(missing, reading))
        residents.busy.update(missing)

    def wait(self, keys: Sequence[Key]) -> None:
        """Wait until what is being read of these clusters is there, and check it. Raises StoreError."""
        for reading in {self._under_way[key] for key in keys if key in self._under_way}:
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

    def _finish(self, reading: _Reading) -> None:
        failure: BaseException | None = None
        for read in reading.reads:
            failure = read.exception() or failure  # all must have ended before frames are given to others
        for key in reading.keys:
            self._under_way.pop(key, None)
        self._residents.busy.difference_update(reading.keys)
        damaged = None if failure else self._damaged(reading.keys)
        if failure is None and damaged is None:
            return
        for key in reading.keys:
            self._residents.frames.give(self._residents.drop(key))
        if failure is not None:
            raise copy(failure) from failure  # see `page_file.finish`
        raise StoreError(f"cluster {damaged} was read and is not what was written; start again from the text")

    def _damaged(self, keys: Sequence[Key]) -> Key | None:
        """The first cluster whose pages do not sum up to its checksum."""
        held = self._tails.frames_of(keys)
        index = torch.tensor(list(chain.from_iterable(held)), dtype=torch.long)
        pages = self._residents.frames.pages
        sums = [  # unused room in a page is zero
            rows_of(pages, some).view(torch.int64).numpy().sum(1) for some in index.split(_CHECKED_PAGES)
        ]
        running = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sums]))  # modulo 2⁶⁴, as differences are
        ends = np.cumsum(np.fromiter(map(len, held), np.int64, len(held)))
        found = running[ends] - running[np.concatenate([[0], ends[:-1]])]
        wrong = np.flatnonzero(found != column("checksums", self._pages.tables, keys))
        return keys[wrong[0]] if wrong.size else None
