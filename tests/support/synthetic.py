"""A text of random entries, decoded on an offloaded cache without a model.

The first value dimension of an entry is its position, so that tests can tell what is stored and what is attended to.
"""

from collections import Counter
from contextlib import contextmanager

import torch

from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.decode.strategy import SinkAttention
from kvweave.models.attention import AttentionCall
from kvweave.models.support import Geometry
from kvweave.ops.attention import AttentionSettings
from kvweave.ops.partial_attention import PartialAttention
from kvweave.plugins import plugins

HEADS, WIDTH = 2, 8
GROUP = 2  # query heads per KV head


def settings(**changes) -> OffloadSettings:
    """Small clusters on small pages, so that little data runs through all of the code."""
    clusters = changes.pop("clusters", {})
    if isinstance(clusters, dict):
        clusters = ClusterSettings(**{"mean_entries": 8, "max_entries": 16, **clusters})
    disk = DiskSettings(**{"page_bytes": 256, **changes.pop("disk", {})})
    return OffloadSettings(**{"window": 8, "clusters": clusters, "disk": disk, **changes})


def geometry(layers: int = 1, dtype: torch.dtype = torch.float32) -> Geometry:
    return Geometry(layers, HEADS, WIDTH, 4096, dtype, torch.device("cpu"))


class Text:
    """A text of random entries that drift, as keys do, decoded on `cache`."""

    def __init__(
        self,
        cache: OffloadedCache,
        seed: int = 0,
        layers: int = 1,
        marked: bool = True,
        steady: bool = False,
        heads: int = HEADS,
        bias: float = 0.0,
    ) -> None:
        self._bias = bias  # of one channel of all keys
        self.cache, self.layers, self._marked, self._heads = cache, layers, marked, heads
        self._steady = (
            torch.randn(1, self._heads * GROUP, 1, WIDTH, generator=torch.Generator().manual_seed(seed))
            if steady
            else None
        )
        self._random = torch.Generator().manual_seed(seed)
        self._centres = torch.randn(5, self._heads, WIDTH, generator=self._random) * 3
        self.keys = torch.zeros(self._heads, 0, WIDTH)
        self.values = torch.zeros(self._heads, 0, WIDTH)

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def begin(self, count: int, rows: int = 4) -> None:
        keys, values = self.entries(count)
        queries = torch.randn(self._heads * GROUP, rows, WIDTH, generator=self._random)
        for layer in range(self.layers):
            self.cache.fill(layer, keys, values, queries, None)

    def step(self, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one pass; return its query and the output of the last layer, (1, H, T, D) each."""
        start = self.length
        keys, values = self.entries(rows)
        query = torch.randn(1, self._heads * GROUP, rows, WIDTH, generator=self._random)
        if self._steady is not None:  # queries change little from row to row
            query = self._steady + 0.1 * query
        for layer in range(self.layers):
            self.cache.before_layer(layer)
            self.cache.layers[layer].update(keys[None], values[None])
            call = AttentionCall(layer, query, keys[None], values[None], AttentionSettings(WIDTH**-0.5))
            output = self.cache.attend(call, torch.arange(start, start + rows))
        return query, output

    def dense(self, query: torch.Tensor) -> torch.Tensor:
        """Return the causal attention of the last rows over everything, as a reference."""
        rows = query.shape[2]
        keys, values = (x.repeat_interleave(GROUP, 0) for x in (self.keys, self.values))  # (H, N, D)
        logits = query[0] @ keys.transpose(1, 2) * WIDTH**-0.5  # (H, T, N)
        late = torch.arange(self.length) > torch.arange(self.length - rows, self.length)[:, None]
        return (logits.masked_fill(late, float("-inf")).softmax(-1) @ values)[None]

    def entries(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._centres += torch.randn(self._centres.shape, generator=self._random) * 0.1 * count**0.5
        groups = torch.randint(0, 5, (count,), generator=self._random)
        keys = self._centres[groups].transpose(0, 1) + torch.randn(
            self._heads, count, WIDTH, generator=self._random
        )
        keys[:, :, 5] += self._bias
        values = torch.randn(self._heads, count, WIDTH, generator=self._random)
        if self._marked:
            values[:, :, 0] = torch.arange(self.length, self.length + count).float()
        self.keys = torch.cat([self.keys, keys], dim=1)
        self.values = torch.cat([self.values, values], dim=1)
        return keys, values


def stored(cache: OffloadedCache, layer: int = 0) -> list[Counter]:
    """Return how often each head holds each position, for strategies with clusters."""
    recent, retriever, store = cache.layers[layer].recent, cache.layers[layer].retriever, cache.shared.store
    found = []
    for head in range(HEADS):
        marks = Counter()
        for _, values, _ in recent.segments():
            marks.update(values[head, :, 0].int().tolist())
        if hasattr(retriever, "buffer"):
            buffered = retriever.buffer.entries[head, : retriever.buffer.count[head]]
            marks.update(store.entry_format.decode(buffered)[1][:, 0].int().tolist())
        for cluster in range(int(retriever.table.count[head])):
            marks.update(members(cache, layer, head, cluster)[1][:, 0].int().tolist())
        found.append(marks)
    return found


def members(cache: OffloadedCache, layer: int, head: int, cluster: int):
    """Return keys and values (n, D) of a cluster, read if needed."""
    store = cache.shared.store
    store.load([(layer, head, cluster)])
    keys, values = store.entry_format.decode(store.entries(layer, head, cluster))
    store.page_cache.unpin_all()
    return keys, values


@contextmanager
def watched_attention(monkeypatch):
    """Collect the positions that each head attends to."""
    seen = [Counter() for _ in range(HEADS)]
    original = PartialAttention.add_logits

    def add_logits(self, logits, values):
        shown = logits[:, -1].isfinite()  # (G, n): what the last row sees
        for head in range(HEADS):
            seen[head].update(values[head, shown[head], 0].int().tolist())
        original(self, logits, values)

    with monkeypatch.context() as patch:
        patch.setattr(PartialAttention, "add_logits", add_logits)
        yield seen


def _retriever(strategy: str):
    with OffloadedCache(geometry(), settings(strategy=strategy)) as cache:
        return cache.layers[0].retriever


STRATEGIES = {name: _retriever(name) for name in ("outline", *sorted(plugins("kvweave.strategies")))}
"""A retriever of every strategy by its name, kvweave's own first."""
CLUSTERED = [name for name, own in STRATEGIES.items() if isinstance(own, ClusterRetriever)]
RETRIEVING = [name for name in STRATEGIES if name in (*CLUSTERED, "entries")]
"""Those that read from the disk; the lab has others, which keep all entries in memory."""
LOSSLESS = [name for name, own in STRATEGIES.items() if type(own) is not SinkAttention]
