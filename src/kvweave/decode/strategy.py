"""Interface of a decoding strategy: what it is made of, its entry budget, and what all layers of a cache share.

A layer holds its sinks and its recent window itself. Entries that leave the window go to the layer's retriever, which
adds some of them to the attention of every pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from kvweave.decode.cluster_table import ClusterTable
from kvweave.decode.counters import DecodeCounts
from kvweave.decode.disk.cluster_pages import ClusterPages
from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.decode.disk.layout import DualHeadPools, Layout
from kvweave.decode.disk.page_file import PageFile
from kvweave.decode.settings import MIN_ENTRIES, ClusterSettings, OffloadSettings
from kvweave.decode.store.cluster_store import ClusterStore
from kvweave.decode.store.frames import FramePool
from kvweave.decode.store.page_cache import EvictionPolicy, PageCache, cluster_scores
from kvweave.decode.store.tail_pages import TailPages
from kvweave.models.support import Geometry
from kvweave.ops.partial_attention import PartialAttention

_MAX_TOKENS = 2**17  # without a limit there are frames for a text of this length; a longer one evicts
_MAX_PORTION_PAGES = 512
_WORKSPACE_SHARE = 8  # a portion takes at most 1/8 of `resident_bytes`


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Entries per layer and KV head that one step may attend to.

    `total` is the limit, `window` the most that the recent window may hold; what it leaves goes to clusters.
    """

    total: int
    window: int

    def remaining(self, attended: int) -> int:
        """Return how many entries may be retrieved if `attended` ones are attended to already."""
        return max(0, self.total - attended)


def token_budget(settings: OffloadSettings, stored: int) -> TokenBudget:
    """Return the budget of a step when `stored` entries exist, the newest row's own included."""
    if settings.kv_budget <= 1:
        share = math.ceil(round(settings.kv_budget * stored, 9))
        total = max(share, settings.sinks + MIN_ENTRIES)
    else:
        total = int(settings.kv_budget)
    free = total - settings.sinks
    window = min(settings.window, max(1, free // 2))
    return TokenBudget(total, window)


@dataclass(frozen=True, slots=True)
class CacheHooks:
    """What a layer and its retriever call in their cache.

    Attributes:
        reserve_memory: makes room for the bytes by which the layer, its retriever or the shared index is about to grow.
        has_room: whether that many bytes more fit.
        on_reads_done: starts the next layer's reads; called in every pass as soon as this layer needs nothing more from disk.
    """

    reserve_memory: Callable[[int], None]
    has_room: Callable[[int], bool]
    on_reads_done: Callable[[], None]


class Retriever:
    """Entries of one layer that have left its window; this one keeps none. Tensor letters: G KV heads, n entries, D head width."""

    @property
    def resident_bytes(self) -> int:
        """KV held in memory, without frames and the shared index."""
        return 0

    @property
    def growth_bytes(self) -> int:
        """Memory that the retriever will take next in addition, when what it has is full."""
        return 0

    def fill(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Store a prompt's entries (G, n, D); `queries` (H, T, D) are those of its last rows, if known."""

    def add(self, keys: Tensor, values: Tensor, budget: TokenBudget) -> None:
        """Store copies of entries (G, n, D) that leave the window, oldest first."""

    def accepts(self, count: int, budget: TokenBudget) -> int:
        """Return how many of `count` entries it takes now; the others stay in the window."""
        return count

    def prefetch_index(self) -> None:
        """Start reading what selection needs; called as the layer's attention begins."""

    def prefetch(self) -> None:
        """Start reading what the layer will probably retrieve; called before it attends."""

    def attend(self, attention: PartialAttention, limit: int) -> int:
        """Add at most `limit` entries per KV head to the attention; return their number, summed over heads."""
        return 0

    def finish_pass(self, budget: TokenBudget) -> None:
        """Do deferred work and release memory; called when the layer is done with a pass."""


class SinkAttention(Retriever):
    """A retriever that discards all entries: attention to sinks and the recent window alone (StreamingLLM)."""


class SharedIndex:
    """What is known of the clusters of all layers at once; this one knows nothing, since retrievers know their own layer's."""

    @property
    def resident_bytes(self) -> int:
        """Memory in use, and memory that is kept free for it."""
        return 0

    @property
    def growth_bytes(self) -> int:
        """Memory that a step may take in addition."""
        return 0

    def close(self) -> None:
        """Close its files."""


@dataclass(frozen=True, slots=True)
class SharedState:
    """What all layers share.

    Attributes:
        clusters: sizes of clusters, the strategy's own if the settings name none.
        portion_pages: the most pages per head that are attended to at once.
    """

    settings: OffloadSettings
    clusters: ClusterSettings
    store: ClusterStore
    index: SharedIndex
    counts: DecodeCounts
    portion_pages: int


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to decode: what retrieves a layer's entries, and what stores and evicts clusters.

    Attributes:
        retriever: makes a layer's retriever.
        clusters: sizes of clusters, unless others are asked for.
        layout: makes the layout on disk, given the pages of the largest cluster.
        store: the class of the cluster store.
        index: makes the shared index.
        counts: makes the counters.
        eviction: which clusters leave memory first.
    """

    retriever: Callable[[int, SharedState, CacheHooks], Retriever]
    clusters: ClusterSettings = field(default_factory=ClusterSettings)
    layout: Callable[[int], Layout] = DualHeadPools
    store: type[ClusterStore] = ClusterStore
    index: Callable[[Geometry, OffloadSettings, ClusterStore, DecodeCounts], SharedIndex] = lambda *_: (
        SharedIndex()
    )
    counts: Callable[[], DecodeCounts] = DecodeCounts
    eviction: EvictionPolicy = cluster_scores


def build_shared_state(
    geometry: Geometry,
    settings: OffloadSettings,
    strategy: Strategy,
    path: Path | None,
    reclaim_frames: Callable[[], None],
) -> SharedState:
    """Create the shared state of a cache.

    `path` is that of its file, None for an unnamed one; for `reclaim_frames` see `PageCache`.

    Raises InvalidRequest for invalid settings, StoreError if a file cannot be created.
    """
    layers, heads = geometry.layers, geometry.kv_heads
    clusters, counts = settings.clusters or strategy.clusters, strategy.counts()
    entry_format = EntryFormat(
        geometry.head_width, geometry.dtype, settings.storage, settings.disk.page_bytes
    )
    largest_pages = entry_format.page_count(clusters.max_entries)
    pages = ClusterPages(
        page_file(path, settings, entry_format, counts),
        entry_format,
        strategy.layout(largest_pages),
        [ClusterTable(heads) for _ in range(layers)],
        largest_pages=largest_pages,
        gap_pages=settings.disk.gap_pages,
    )
    frame_count, portion_pages = _memory_pages(geometry, settings, entry_format)
    frames = FramePool(frame_count, entry_format.page_bytes)
    tails = TailPages(pages, frames, counts, settings.disk.tail_pages)
    page_cache = PageCache(frames, strategy.eviction, counts, layers, heads, tails, reclaim_frames)
    store = strategy.store(pages, page_cache, tails, counts)
    index = strategy.index(geometry, settings, store, counts)
    return SharedState(settings, clusters, store, index, counts, portion_pages)


def page_file(
    path: Path | None, settings: OffloadSettings, entry_format: EntryFormat, counts: DecodeCounts
) -> PageFile:
    """Create a file with pages of the entries' size; None as the path for an unnamed one. Raises StoreError."""
    disk = settings.disk
    return PageFile(
        path,
        entry_format.page_bytes,
        counts,
        folder=settings.folder,
        direct=disk.direct,
        readers=disk.readers,
    )


def _memory_pages(
    geometry: Geometry, settings: OffloadSettings, entry_format: EntryFormat
) -> tuple[int, int]:
    """Return the number of frames, and of pages per head that are attended to at once."""
    if settings.resident_bytes is None:
        tokens = min(geometry.context_tokens, _MAX_TOKENS)
        clusters = geometry.layers * geometry.kv_heads
        return 2 * clusters * entry_format.page_count(tokens) + 64, _MAX_PORTION_PAGES
    workspace_bytes = settings.resident_bytes // _WORKSPACE_SHARE
    affordable = workspace_bytes // (geometry.kv_heads * entry_format.workspace_bytes)
    frames = settings.resident_bytes // entry_format.page_bytes
    return frames, max(1, min(_MAX_PORTION_PAGES, affordable))
