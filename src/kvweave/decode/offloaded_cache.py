"""The KV of one text that is decoded by retrieval, as a transformers cache: its layers, and what they share.

A model goes on from it as from a canvas: by our own steps or an ordinary `generate`. Holds to the bound of memory:
what windows, buffers and centroids need is taken from the frames in which clusters stay.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from kvweave.decode.clusters.centroids import SPARE_COLUMNS, Centroids
from kvweave.decode.clusters.retrieval import PORTION_PAGES, ClusterParts
from kvweave.decode.clusters.table import ClusterTable
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.cluster_store import StoredClusters
from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.layout import DualHeadPools, PackedRegions
from kvweave.decode.disk.page_file import PageFile
from kvweave.decode.disk.pages import ClusterPages
from kvweave.decode.layer import OffloadedLayer
from kvweave.decode.page_cache.frames import Frames
from kvweave.decode.page_cache.page_cache import DevicePages, Residents
from kvweave.decode.retriever import allowance
from kvweave.decode.settings import OffloadSettings
from kvweave.decode.strategies import strategy_named
from kvweave.errors import InvalidRequest, StoreError
from kvweave.models.attention import AttentionCall, RowPlan
from kvweave.models.cache_base import AppendableCache
from kvweave.models.support import Geometry

_MOST_TOKENS = 2**17  # frames without a bound are made for so long a text; a longer one evicts
_ROWS_AT_ONCE = 256  # of a prompt, which share what is retrieved
_WORKSPACE_SHARE = 8  # at most 1/8 of the bound is what a portion is laid out in


class OffloadedPlan(RowPlan):
    """New rows (T,) attend to what each layer of `held` offers them."""

    def __init__(self, held: "OffloadedCache", rows: Tensor, dtype: torch.dtype) -> None:
        super().__init__(rows, dtype)
        self._held = held

    def attend(self, call: AttentionCall) -> Tensor:
        """Attention of the rows' query (1, H, T, D); keys and values of the call are the rows' own."""
        return self._held.attend(call, self.rows)


class OffloadedCache(AppendableCache):
    """KV on flash and in memory for one text. Close it: its files are without a name and go with it.

    `positions` (N,) are the rotary positions of the prompt it will be filled with, empty for a text that starts with
    its first pass. `files` names where its two files lie, for a text that is to outlive the process. Raises
    InvalidRequest for settings that cannot be honoured, StoreError where no file can be made.
    """

    def __init__(
        self,
        geometry: Geometry,
        settings: OffloadSettings,
        positions: Tensor | None = None,
        files: tuple[Path, Path] | None = None,
    ) -> None:
        self.settings = settings
        self.geometry = geometry
        self.counts = DecodeCounts()
        make = strategy_named(settings.strategy)
        form = EntryFormat(geometry.head_width, geometry.dtype, settings.storage, settings.flash.page_bytes)
        self._failure: str | None = None  # in words: its traceback would hold this very text
        self._before_change: Callable[[], None] | None = None
        self._expected_bytes = 0
        self._layer_bytes = [0] * geometry.layers  # what each has beside frames and centroids
        self.parts = _build(geometry, settings, form, self.counts, files)
        try:
            layers = [
                OffloadedLayer(
                    settings.sinks, make(index, self.parts), lambda stored: allowance(settings, stored)
                )
                for index in range(geometry.layers)
            ]
            own = cast(
                OffloadedCache, weakref.proxy(self)
            )  # nothing holds itself: frames go with the last reference
            self.parts.store.residents.more_frames = partial(OffloadedCache._take_back, own)
            for index, layer in enumerate(layers):
                layer.before_growth = layer.retriever.before_growth = partial(
                    OffloadedCache._grow, own, index
                )
            if settings.residency.prefetch:
                for index, layer in enumerate(layers):
                    layer.retriever.when_read = partial(OffloadedCache._fetch_after, own, index)
            where = torch.empty(0, dtype=torch.long) if positions is None else positions
            super().__init__(layers, where.to(geometry.device))
            self.continuation = partial(OffloadedPlan, own, dtype=geometry.dtype)
            self._check_room(*range(geometry.layers))
        except BaseException:
            self.close()
            raise

    def attend(self, call: AttentionCall, rows: Tensor) -> Tensor:
        """One layer's attention output (1, H, T, D) for new rows (T,) that its update has taken in.

        Raises StoreError, StoreFull or InvalidRequest (not enough memory); nothing can be computed here afterwards.
        """
        with self._usable():
            self._begin(call.layer)
            layer: OffloadedLayer = self.layers[call.layer]
            output, seen = layer.attend(call, rows)
            self._count(call.layer, rows.numel(), seen)
        return output

    def attend_behind(self, call: AttentionCall, rows: Tensor) -> Tensor:
        """One layer's attention output (1, H, T, D) for rows (T,) of a prompt behind this text, which takes nothing in.

        Keys and values of the call are the prompt's. What is retrieved is chosen for some rows together. Raises as
        `attend`.
        """
        outputs = []
        with self._usable():
            self._begin(call.layer)
            layer: OffloadedLayer = self.layers[call.layer]
            some = zip(call.query.split(_ROWS_AT_ONCE, dim=2), rows.split(_ROWS_AT_ONCE), strict=True)
            for query, own in some:
                output, seen = layer.attend_behind(replace(call, query=query), own)
                self._count(call.layer, own.numel(), seen)
                outputs.append(output)
        return torch.cat(outputs, dim=2)

    def append(self, layer: int, keys: Tensor, values: Tensor, sliding: int | None) -> None:
        """Take in one layer of that prompt, keys and values (G, N, D); see `OffloadedLayer.extend`."""
        with self._usable():
            self.layers[layer].extend(keys, values, sliding)
            self._check_room(layer)

    def before_layer(self, layer: int) -> None:
        """Start reading the layer's centroids while the model projects its query."""
        with self._usable():
            if self.layers[layer].sliding is None:
                self.layers[layer].retriever.begin()

    def fill(
        self, layer: int, keys: Tensor, values: Tensor, queries: Tensor | None, sliding: int | None
    ) -> None:
        """Take in one layer of a prompt, keys and values (G, N, D); see `OffloadedLayer.fill`."""
        with self._usable():
            self.layers[layer].fill(keys, values, queries, sliding)
            self._check_room(layer)

    @property
    def resident_bytes(self) -> int:
        """KV held in memory now, with everything that is set aside to hold it."""
        return self._besides_frames() + self.parts.store.residents.frames.touched_bytes

    @property
    def usable(self) -> bool:
        """Whether nothing has failed so far: what failed once is not gone on with."""
        return self._failure is None

    def before_change(self, then: Callable[[], None]) -> None:
        """Call this once, before the next pass changes anything."""
        self._before_change = then

    def flush(self) -> dict[str, object]:
        """Bring all of it to the disk itself; what is in memory besides, for `StoredClusters.restore_resident`.

        Raises StoreError and StoreFull; nothing can be computed here afterwards.
        """
        with self._usable():
            resident = self.parts.store.resident_state()
            self.parts.store.flush()
            for layer in range(len(self.layers)):
                self.parts.representatives.end(layer, write=True)
            self.parts.representatives.sync()
        return resident

    def look_at(self, *changed: int) -> None:
        """Note what these layers take now."""
        for index in changed:
            layer: OffloadedLayer = self.layers[index]
            self._layer_bytes[index] = layer.recent.resident_bytes + layer.retriever.resident_bytes

    def hold_to_bound(self, more_bytes: int = 0) -> None:
        """Give frames up for what windows and centroids have come to need.

        `more_bytes` are about to be needed. Raises InvalidRequest if frames are not enough.
        """
        bound, frames = self.settings.resident_bytes, self.parts.store.residents.frames
        self.counts.hold(self.resident_bytes)
        self._expected_bytes = more_bytes
        if bound is not None:
            besides = self._besides_frames() + more_bytes
            allowed = (bound - besides) // frames.page_bytes
            if allowed < 0:
                raise InvalidRequest(
                    f"resident_bytes is {bound}; windows, buffers and centroids alone take {besides}: allow "
                    f"{besides - bound} bytes more, and some for clusters"
                )
            surplus = frames.count - allowed
            if surplus > 0:
                self.parts.store.residents.make_free(surplus)
                frames.withdraw(surplus)

    def _take_back(self) -> None:
        """Have frames again that windows and centroids need no more."""
        bound, frames = self.settings.resident_bytes, self.parts.store.residents.frames
        if bound is not None and frames.withdrawn:
            unused = (
                bound - self._besides_frames() - self._expected_bytes
            ) // frames.page_bytes - frames.count
            frames.give_back(max(0, min(unused, frames.withdrawn)))

    def _check_room(self, *changed: int) -> None:
        """Hold to the bound as these layers have come to be; refuse it if it leaves too little for the steps that come."""
        self.look_at(*changed)
        self.hold_to_bound()
        self._take_back()
        if self.settings.strategy not in ("dense", "window"):
            growth, layers = self.parts.representatives.growth_bytes, range(len(self.layers))
            self.parts.store.check_room(max(growth(index, SPARE_COLUMNS + 1, 2) for index in layers))

    def close(self) -> None:
        """Close the files, waiting for reads under way; closing twice is fine. Nothing can be computed here afterwards."""
        self._failure = self._failure or "it was closed"
        self.parts.store.close()
        self.parts.representatives.close()

    def __enter__(self) -> "OffloadedCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """What failed once is not gone on with: part of a pass may have been taken in."""
        if self._failure is not None:
            raise StoreError(f"this text's KV cannot be used any more: {self._failure}")
        try:
            yield
        except BaseException as error:  # an interruption too
            self._failure = str(error) or f"it was stopped by {type(error).__name__}"
            raise

    def _begin(self, layer: int) -> None:
        """A pass comes to a layer: with the first one everything may change."""
        if layer == 0:
            if self._before_change is not None:
                self._before_change()
                self._before_change = None
            self.parts.store.residents.next_row()

    def _grow(self, index: int, more_bytes: int) -> None:
        """A layer is about to take so many bytes more."""
        if more_bytes:
            with self._usable():
                self.look_at(index)
                self.hold_to_bound(more_bytes)

    def _count(self, layer: int, rows: int, seen: int) -> None:
        self.counts.rows += rows * (layer == 0)
        self.counts.attended += seen
        self.look_at(layer)
        self.hold_to_bound()

    def _fetch_after(self, index: int) -> None:
        """Start reading what the next layer that retrieves will probably ask for, beside the rest of this one."""
        for following in (*self.layers[index + 1 :], *self.layers[:index]):
            if following.sliding is None:
                following.retriever.ahead()
                return

    def _besides_frames(self) -> int:
        parts = self.parts
        return (
            sum(self._layer_bytes)
            + parts.representatives.resident_bytes
            + parts.store.pages.buffer_bytes
            + self._workspace_bytes
        )

    @property
    def _workspace_bytes(self) -> int:
        """What a portion is laid out in, and the copies that a split works on."""
        form = self.parts.store.form
        portion = self.parts.portion_pages * self.geometry.kv_heads
        keys_and_values = 2 * form.per_page * form.width
        split = form.pages(self.settings.clusters.max_entries) * (form.page_bytes + 4 * keys_and_values)
        return portion * form.laid_out_bytes + split


def _build(
    geometry: Geometry,
    settings: OffloadSettings,
    form: EntryFormat,
    counts: DecodeCounts,
    files: tuple[Path, Path] | None,
) -> ClusterParts:
    flash, layers, heads = settings.flash, geometry.layers, geometry.kv_heads
    opened = partial(
        PageFile,
        page_bytes=form.page_bytes,
        counts=counts,
        folder=settings.folder,
        direct=flash.direct,
        readers=flash.readers,
    )
    entries_path, centroids_path = files or (None, None)
    entries = opened(entries_path)
    try:
        centroids = opened(centroids_path)
    except StoreError:
        entries.close()
        raise
    largest_pages = form.pages(settings.clusters.max_entries)
    pools = PackedRegions() if flash.layout == "packed" else DualHeadPools(largest_pages)
    tables = [ClusterTable(heads) for _ in range(layers)]
    portion_pages = PORTION_PAGES
    tokens = min(geometry.context_tokens, _MOST_TOKENS)
    count = 2 * layers * heads * form.pages(tokens) + 64
    if settings.resident_bytes is not None:
        count = settings.resident_bytes // form.page_bytes
        most = settings.resident_bytes // _WORKSPACE_SHARE // (heads * form.laid_out_bytes)
        portion_pages = max(1, min(PORTION_PAGES, most))
    residents = Residents(
        Frames(count, form.page_bytes), settings.residency.replacement, counts, layers, heads
    )
    pages = ClusterPages(
        entries, form, pools, tables, counts, largest_pages=largest_pages, gap_pages=flash.gap_pages
    )
    device = None
    if settings.device_bytes is not None:
        there = settings.device_bytes // form.page_bytes
        device = DevicePages(
            geometry.device, there, form.page_bytes, settings.residency.replacement, layers, heads
        )
    store = StoredClusters(pages, residents, counts, tail_pages=flash.tail_pages, device=device)
    paged = settings.residency.representatives == "paged"
    representatives = Centroids(layers, heads, geometry.head_width, centroids, paged=paged)
    return ClusterParts(settings, store, representatives, counts, portion_pages)
