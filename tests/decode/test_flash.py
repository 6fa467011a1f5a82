"""How clusters lie on flash: pools, runs, neighbours, tails and what growing moves."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from driving import HEADS, Text, geometry, settings
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvweave.decode.disk.layout import DualHeadPools, PackedRegions, chain, together
from kvweave.decode.disk.page_file import joined
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.page_cache.frames import Frames
from kvweave.ops.partial_attention import PartialAttention


def test_a_pair_grows_inward_and_neighbours_the_next_pool():
    pools = DualHeadPools(4)
    first, second, third = (pools.take((0, 0)) for _ in range(3))
    pages = np.arange(4)
    lie = [pools.numbers(np.full(4, half), pages).tolist() for half in (first, second, third)]
    assert lie == [
        [0, 1, 2, 3],
        [7, 6, 5, 4],
        [8, 9, 10, 11],
    ]  # the first two meet, the third is right behind


def test_heads_do_not_share_pools_and_a_place_given_back_is_taken_again():
    pools = DualHeadPools(4)
    own, other = pools.take((0, 0)), pools.take((0, 1))
    assert own // 2 != other // 2
    pools.give((0, 1), other)
    assert pools.take((0, 1)) == other


@how(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), unique=True, max_size=30), st.randoms(), st.integers(0, 3))
def test_runs_bring_every_page_to_its_frame(numbers, shuffled, gap):
    """Read by hand from a file of numbered pages: what frame holds which page."""
    if shuffled.random() < 0.5:
        numbers = sorted(numbers)
    memory, waste = Frames(200, 8), memoryview(bytearray(8 * gap))
    frames = memory.take(len(numbers))
    if shuffled.random() < 0.5:
        shuffled.shuffle(frames)
    runs = joined(np.array(numbers, np.int64), np.array(frames, np.int64), memory, waste, gap)
    for run in runs:
        at = run.first
        for part in run.parts:
            for start in range(0, len(part), 8):
                part[start : start + 8] = at.to_bytes(8, "little")
                at += 1
        assert at == run.first + run.pages
    for page, frame in zip(numbers, frames, strict=True):
        assert int(memory.pages[frame].view(torch.int64)) == page
    for one, following in pairwise(runs):
        assert following.first - (one.first + one.pages) > gap  # else they were one run


def test_clusters_asked_for_together_follow_each_other():
    asked = torch.zeros(8, 6, dtype=torch.bool)
    for query, pair in enumerate([(0, 4), (0, 4), (0, 4), (1, 3), (1, 3), (2, 5), (2, 5), (2, 5)]):
        asked[query, list(pair)] = True
    order = chain(together(asked))
    assert sorted(order) == list(range(6))
    places = np.argsort(order)
    for one, other in ((0, 4), (1, 3), (2, 5)):
        assert abs(places[one] - places[other]) == 1


def test_growing_moves_nothing_in_pools_and_all_behind_it_when_packed():
    moved, splits = {}, {}
    for strategy in ("static", "dynakv"):
        for layout in ("dual-head", "packed"):
            kv = settings(strategy=strategy, flash={"layout": layout})
            with OffloadedCache(geometry(), kv) as held:
                text = Text(held)
                text.begin(200)
                for _ in range(100):
                    text.step()
                moved[strategy, layout] = held.counts.moved_bytes
                splits[strategy, layout] = held.counts.splits
    assert moved["static", "dual-head"] == splits["static", "dual-head"] == 0
    assert moved["static", "packed"] > 100 * 256
    halves = splits[
        "dynakv", "dual-head"
    ]  # each at least a page, at most half of the largest cluster and a newcomer
    assert 0 < 256 * halves <= moved["dynakv", "dual-head"] <= 256 * 5 * halves
    assert moved["dynakv", "packed"] > 10 * moved["dynakv", "dual-head"]


def test_a_packed_home_is_right_behind_the_one_before():
    regions = PackedRegions()
    first, second = regions.take((0, 0)), regions.take((0, 0))
    assert regions.reserve(first, 3) == regions.reserve(second, 2) == []
    (move,) = regions.reserve(first, 5)
    assert (move.first, move.pages, move.to) == (3, 2, 5)
    assert regions.numbers(np.array([second, second, first]), np.array([0, 1, 4])).tolist() == [5, 6, 4]


def test_flash_sees_whole_pages_of_clusters_that_grow_in_memory():
    """Entries of a cluster wait in memory for their page: one write per page, not one per entry."""
    with OffloadedCache(geometry(), settings(kv_budget=1.0, strategy="static")) as held:
        text = Text(held)
        text.begin(100)
        before = held.counts.copy()
        for _ in range(100):
            text.step()
        done = held.counts.since(before)
    assert done.partial_pages == 0
    per_page = 256 // (2 * 8 * 4)
    assert done.pages_written <= HEADS * 100 / per_page + 64  # centroids besides


@pytest.mark.parametrize("tail_pages", [1, 4])
def test_of_clusters_that_leave_memory_a_head_keeps_few_half_filled_pages(tail_pages):
    limit = settings(
        kv_budget=1.0, strategy="static", resident_bytes=30_000, flash={"tail_pages": tail_pages}
    )
    with OffloadedCache(geometry(), limit) as held:
        text = Text(held)
        text.begin(100)
        for _ in range(60):
            query, output = text.step()
            assert len(held.parts.store._tails) <= HEADS * tail_pages
        assert held.counts.partial_pages > 0
        torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)


def test_neighbours_are_read_in_fewer_reads_than_clusters_in_the_order_made():
    """Queries that keep asking for the same scattered clusters: placed together, they come in fewer reads."""
    reads = {}
    for order in ("together", "made"):
        held = OffloadedCache(
            geometry(), settings(kv_budget=60, resident_bytes=30_000, flash={"order": order, "gap_pages": 0})
        )
        with held:
            text = Text(held, seed=5)
            directions = torch.randn(3, HEADS * 2, 1, 8, generator=torch.Generator().manual_seed(9)) * 3
            keys, values = text._entries(500)
            rows = directions[torch.arange(24) % 3, :, 0].transpose(0, 1)
            held.fill(0, keys, values, rows, None)
            retriever = held.layers[0].retriever
            total = 0
            for direction in directions:
                attention = PartialAttention(direction[None], HEADS, scaling=8**-0.5)
                before = held.counts.cluster_reads
                retriever.attend(attention, 60)
                total += held.counts.cluster_reads - before
            reads[order] = total
    assert reads["together"] < reads["made"]
