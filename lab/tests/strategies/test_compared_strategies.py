"""What sets the compared strategies apart; what all guarantee is in tests/decode/test_strategies.py."""

import os
from dataclasses import replace

import pytest
import torch

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import StoreError
from kvweave_lab.strategies import counts_since
from kvweave_lab.strategies.centroid import CentroidSettings
from support.synthetic import HEADS, Text, geometry, settings


@pytest.mark.parametrize("strategy", ["entries", "static", "local"])
def test_the_entries_with_the_largest_weights_are_attended_to(strategy):
    """The scan ranks every key, and so do clusters if all are candidates."""
    cache = OffloadedCache(
        geometry(),
        settings(kv_budget=40, strategy=strategy, clusters=CentroidSettings(8, 16, candidates=1000.0)),
    )
    text = Text(cache)
    text.begin(200)
    query, output = text.step()
    logits = (query[0].unflatten(0, (HEADS, -1))[:, :, 0] @ text.keys.transpose(1, 2)) * text.keys.shape[
        2
    ] ** -0.5
    between = slice(4, text.length - 8)  # after the sinks, before the window
    of_all = logits[:, :, between].softmax(-1) if strategy == "entries" else logits.softmax(-1)[:, :, between]
    best = of_all.sum(1).topk(40 - 4 - 8).indices + 4
    for head in range(HEADS):
        kept = [*range(4), *best[head].tolist(), *range(text.length - 8, text.length)]
        shares = logits[head][:, kept].softmax(-1)
        expected = shares @ text.values[head, kept]
        torch.testing.assert_close(
            output[0].unflatten(0, (HEADS, -1))[head, :, 0], expected, atol=1e-4, rtol=1e-4
        )
    cache.close()


def test_candidates_are_limited_to_what_memory_holds_at_once():
    """Otherwise evicted candidates would be read again; whole clusters are attended to instead."""
    outputs = []
    for candidates in (1.0, 1000.0):
        given = settings(
            kv_budget=60,
            resident_bytes=30_000,
            strategy="static",
            clusters=CentroidSettings(8, 16, candidates=candidates),
        )  # never split: splits depend on what memory holds
        with OffloadedCache(geometry(), given) as cache:
            text = Text(cache, marked=False)
            text.begin(600)
            outputs.append([text.step()[1] for _ in range(20)])
            assert cache.counts.peak_resident_bytes <= 30_000
    for whole, ranked in zip(*outputs, strict=True):
        torch.testing.assert_close(ranked, whole, atol=1e-5, rtol=1e-5)  # summed in another order


def test_static_clusters_grow_wider_than_adaptive_ones():
    """The paper's distribution shift (§2.3), on keys that drift."""
    variance = {}
    for strategy in ("dynakv", "static"):
        with OffloadedCache(geometry(), settings(strategy=strategy)) as cache:
            text = Text(cache)
            text.begin(100)
            for _ in range(300):
                text.step()
            table, variances = cache.shared.store.tables[0], cache.layers[0].retriever.variances.of
            width = min(table.sizes.shape[1], variances.shape[1])
            sizes, variances = table.sizes[:, :width], variances[:, :width]
            variance[strategy] = float((sizes * variances).sum() / sizes.sum())
    assert variance["dynakv"] < variance["static"] / 1.5


def test_clusters_that_grow_in_memory_are_written_in_whole_pages():
    """Entries stay in memory until their page is full: one write per page, not one per entry."""
    with OffloadedCache(geometry(), settings(kv_budget=1.0, strategy="static")) as cache:
        text = Text(cache)
        text.begin(100)
        before = replace(cache.counts)
        for _ in range(100):
            text.step()
        done = counts_since(before, cache.counts)
    assert done.partial_pages == 0
    page_entries = 256 // (2 * 8 * 4)
    assert done.pages_written <= HEADS * 100 / page_entries + 64  # and centroids


def test_zeros_in_place_of_single_entries_are_detected(tmp_path):
    chosen = settings(kv_budget=1.0, resident_bytes=40_000, strategy="entries", folder=tmp_path)
    with OffloadedCache(geometry(), chosen) as cache:
        text = Text(cache)
        text.begin(400)
        file = cache.shared.store.pages.file
        length = os.fstat(file.descriptor).st_size
        os.ftruncate(file.descriptor, 0)
        os.ftruncate(file.descriptor, length)
        with pytest.raises(
            StoreError, match=r"page \d+ of layer 0, head \d was read and is not what was written"
        ):
            text.step()
