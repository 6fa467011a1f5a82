"""Copies of clusters on a device change only where clusters are read from.

Here the device is the CPU, with separate memory for the copies. A missing or outdated copy shows as on any device.
"""

import pytest
import torch

from kvweave.decode.counters import DecodeCounts
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import InvalidRequest
from support.synthetic import Text, geometry, settings

PAGE_BYTES = 256
TIGHT = 60_000  # bytes: enough for some of the clusters below, not for all


def decoded(rows: int = 60, **changes) -> tuple[DecodeCounts, torch.Tensor, OffloadedCache]:
    cache = OffloadedCache(geometry(2), settings(resident_bytes=TIGHT, **changes))
    with cache:
        text = Text(cache, layers=2, steady=True)
        text.begin(400)
        outputs = [text.step()[1] for _ in range(rows)]
    return cache.counts, torch.cat(outputs), cache


@pytest.mark.parametrize("device_bytes", [12_000, 400_000])
def test_the_whole_budget_is_dense_attention(device_bytes):
    """With memory for a few clusters, and for all, while entries join clusters and splits replace them."""
    given = settings(kv_budget=1.0, resident_bytes=TIGHT, device_bytes=device_bytes)
    with OffloadedCache(geometry(2), given) as cache:
        text = Text(cache, layers=2)
        text.begin(200)
        for _ in range(60):
            query, output = text.step()
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
        copies = cache.shared.store.device
        assert copies.pages.nbytes <= device_bytes
        assert cache.counts.copied_bytes > 0


def test_the_same_clusters_are_attended_to_with_fewer_pages_read():
    chosen = {
        "kv_budget": 120,
        "clusters": {"spread": 1e6, "max_entries": 64},
    }  # no splits: these depend on memory
    alone, expected, _ = decoded(**chosen)
    counts, output, _ = decoded(device_bytes=100_000, **chosen)
    assert counts.splits == 0
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    assert counts.attended == alone.attended
    assert counts.pages_read < alone.pages_read
    assert counts.hit_rate > alone.hit_rate


def test_copies_that_stay_are_not_made_again():
    large, _, _ = decoded(kv_budget=120, device_bytes=400_000)
    small, _, _ = decoded(kv_budget=120, device_bytes=12_000)
    assert large.copied_bytes < small.copied_bytes / 2


def test_the_error_for_too_few_bytes_names_the_missing_bytes():
    with pytest.raises(InvalidRequest, match=r"device_bytes.*bytes more"):
        OffloadedCache(geometry(), settings(device_bytes=2_000))
    with pytest.raises(InvalidRequest, match="device_bytes is 0"):
        settings(device_bytes=0)
