"""Layout of clusters on disk: pools, runs, neighbours, half-filled pages, and what growth moves."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvweave.decode.disk.layout import DualHeadPools, co_retrievals, neighbour_order
from kvweave.decode.disk.page_file import merge_runs
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.store.frames import FramePool
from support.synthetic import HEADS, Text, geometry, settings


def test_a_pair_grows_inward_and_neighbours_the_next_pool():
    pools = DualHeadPools(4)
    first, second, third = (pools.allocate((0, 0)) for _ in range(3))
    pages = np.arange(4)
    places = [pools.page_numbers(np.full(4, half), pages).tolist() for half in (first, second, third)]
    assert places == [
        [0, 1, 2, 3],
        [7, 6, 5, 4],
        [8, 9, 10, 11],
    ]  # the first two meet, the third follows


def test_heads_do_not_share_pools_and_a_freed_home_is_reused():
    pools = DualHeadPools(4)
    own, other = pools.allocate((0, 0)), pools.allocate((0, 1))
    assert own // 2 != other // 2
    pools.free((0, 1), other)
    assert pools.allocate((0, 1)) == other


@how(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), unique=True, max_size=30), st.randoms(), st.integers(0, 3))
def test_runs_read_every_page_into_its_frame(numbers, shuffled, gap):
    """Simulate reading from a file of numbered pages, and check which frame holds which page."""
    if shuffled.random() < 0.5:
        numbers = sorted(numbers)
    memory, waste = FramePool(200, 8), memoryview(bytearray(8 * gap))
    frames = memory.allocate(len(numbers))
    if shuffled.random() < 0.5:
        shuffled.shuffle(frames)
    runs = merge_runs(np.array(numbers, np.int64), np.array(frames, np.int64), memory, waste, gap)
    for run in runs:
        at = run.first
        for part in run.buffers:
            for start in range(0, len(part), 8):
                part[start : start + 8] = at.to_bytes(8, "little")
                at += 1
        assert at == run.first + run.pages
    for page, frame in zip(numbers, frames, strict=True):
        assert int(memory.pages[frame].view(torch.int64)) == page
    for one, following in pairwise(runs):
        assert following.first - (one.first + one.pages) > gap  # else they were one run


def test_clusters_retrieved_together_are_neighbours():
    asked = torch.zeros(8, 6, dtype=torch.bool)
    for query, pair in enumerate([(0, 4), (0, 4), (0, 4), (1, 3), (1, 3), (2, 5), (2, 5), (2, 5)]):
        asked[query, list(pair)] = True
    order = neighbour_order(co_retrievals(asked))
    assert sorted(order) == list(range(6))
    places = np.argsort(order)
    for one, other in ((0, 4), (1, 3), (2, 5)):
        assert abs(places[one] - places[other]) == 1


@pytest.mark.parametrize("tail_pages", [1, 4])
def test_a_head_keeps_few_half_filled_pages_of_evicted_clusters(tail_pages):
    limit = settings(kv_budget=1_000, resident_bytes=60_000, disk={"tail_pages": tail_pages})
    with OffloadedCache(geometry(), limit) as cache:
        text = Text(cache)
        text.begin(400)
        for _ in range(60):
            query, output = text.step()
            assert len(cache.shared.store.tails) <= HEADS * tail_pages
        assert cache.counts.partial_pages > 0
        torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
