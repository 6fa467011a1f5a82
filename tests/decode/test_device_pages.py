"""Clusters on a device: copies that change nothing but where they are read from.

Here the device is the CPU, with a memory of its own that nothing but the copies gets into: what is missing or out of date
there shows as it would on any other.
"""

import pytest
import torch
from driving import Text, geometry, settings

from kvweave.decode.counters import DecodeCounts
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import InvalidRequest

PAGE_BYTES = 256
TIGHT = 60_000  # bytes: holds some of the clusters below, not all


def decoded(rows: int = 60, **changes) -> tuple[DecodeCounts, torch.Tensor, OffloadedCache]:
    held = OffloadedCache(geometry(2), settings(resident_bytes=TIGHT, **changes))
    with held:
        text = Text(held, layers=2, steady=True)
        text.begin(400)
        outputs = [text.step()[1] for _ in range(rows)]
    return held.counts, torch.cat(outputs), held


@pytest.mark.parametrize("strategy", ["dynakv", "static", "local"])
@pytest.mark.parametrize("device_bytes", [12_000, 400_000])
def test_the_whole_budget_is_dense_attention(strategy, device_bytes):
    """Room for a few clusters, and for all: entries join them and splits replace them all the while."""
    given = settings(kv_budget=1.0, strategy=strategy, resident_bytes=TIGHT, device_bytes=device_bytes)
    with OffloadedCache(geometry(2), given) as held:
        text = Text(held, layers=2)
        text.begin(200)
        for _ in range(60):
            query, output = text.step()
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
        copies = held.parts.store.device
        assert copies.pages.nbytes <= device_bytes
        assert held.counts.copied_bytes > 0


def test_the_same_clusters_are_attended_to_and_fewer_pages_read():
    chosen = {"kv_budget": 120, "strategy": "static"}
    alone, expected, _ = decoded(**chosen)
    counts, output, _ = decoded(device_bytes=100_000, **chosen)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    assert counts.attended == alone.attended
    assert counts.pages_read < alone.pages_read
    assert counts.hit_rate > alone.hit_rate


def test_what_stays_on_the_device_is_not_copied_again():
    large, _, _ = decoded(kv_budget=120, strategy="static", device_bytes=400_000)
    small, _, _ = decoded(kv_budget=120, strategy="static", device_bytes=12_000)
    assert large.copied_bytes < small.copied_bytes / 2


def test_too_few_bytes_say_how_many_are_missing():
    with pytest.raises(InvalidRequest, match=r"device_bytes.*bytes more"):
        OffloadedCache(geometry(), settings(device_bytes=2_000))
    with pytest.raises(InvalidRequest, match="device_bytes is 0"):
        settings(device_bytes=0)
