"""What stays in memory: frames, and which clusters are evicted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvweave.decode.counters import DecodeCounts
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.store.frames import FramePool
from kvweave.decode.store.page_cache import ClusterUsage, PageCache, cluster_scores
from kvweave.errors import InvalidRequest
from kvweave.models.support import Geometry
from support.synthetic import Text, geometry, settings


def usage(used_at, updated_at, uses, pages, now=100, frames=100) -> ClusterUsage:
    """Return usage of one layer's clusters, which has attended in the current row."""
    arrays = [np.array(values, np.int64) for values in (used_at, updated_at, uses, pages)]
    return ClusterUsage(*arrays, now - arrays[0], np.zeros(len(pages)), now, frames)


class Tails(list):
    """The frames of last pages alone, which are written nowhere."""

    def __init__(self, frames: FramePool | None = None) -> None:
        super().__init__()
        self.frames = frames

    def add(self, key, frame) -> None:
        self.append(frame)

    def evict_one(self) -> bool:
        return bool(self) and self.frames.free([self.pop()]) is None


def evicted(scores) -> list[int]:
    return np.argsort(-scores, kind="stable").tolist()


def test_large_clusters_are_evicted_first_if_used_alike():
    assert evicted(cluster_scores(usage([90] * 3, [0] * 3, [1] * 3, [2, 8, 1]))) == [1, 0, 2]


def test_age_is_how_often_a_layer_attended_without_the_cluster():
    page_cache = PageCache(FramePool(4, 64), cluster_scores, DecodeCounts(), 4, 1, Tails())
    for layer in range(4):
        page_cache.current_layer = layer
        page_cache.insert((layer, 0, 0), page_cache.allocate(1))
    page_cache.next_row()
    for layer in range(2):
        page_cache.current_layer = layer
        page_cache.record_use([(layer, 0, 0)] if layer else [])
    # The first layer attended without its own. The others were used when possible; of them, the second attends last again.
    evictions = []
    for number in range(1, 4):
        before = {(layer, 0, 0) for layer in range(4) if (layer, 0, 0) in page_cache}
        page_cache.insert((1, 0, number), page_cache.allocate(1))
        page_cache.pin([(1, 0, number)])
        evictions += [key[0] for key in before if key not in page_cache]
    assert evictions == [0, 1, 3]


def test_clusters_of_the_first_layer_stay_while_the_last_attends():
    page_cache = PageCache(FramePool(4, 64), cluster_scores, DecodeCounts(), 4, 1, Tails())
    for layer in range(4):
        page_cache.current_layer = layer
        page_cache.insert((layer, 0, 0), page_cache.allocate(1))
    page_cache.pin([(3, 0, 0)])
    page_cache.allocate(1)
    assert (0, 0, 0) in page_cache
    assert (2, 0, 0) not in page_cache


def test_unused_prefetched_clusters_are_older_than_used_ones():
    page_cache = PageCache(FramePool(3, 64), cluster_scores, DecodeCounts(), 2, 1, Tails())
    page_cache.next_row()
    page_cache.current_layer = 0
    page_cache.insert((0, 0, 0), page_cache.allocate(1))
    for cluster in range(2):
        page_cache.insert((1, 0, cluster), page_cache.allocate(1), prefetched=True)
    page_cache.current_layer = 1
    page_cache.record_use([(1, 0, 1)])
    page_cache.next_row()
    page_cache.current_layer = 0
    page_cache.pin([(0, 0, 0)])
    page_cache.allocate(1)
    assert (1, 0, 0) not in page_cache
    assert (1, 0, 1) in page_cache


def test_recently_updated_clusters_stay_up_to_a_quarter_of_the_frames():
    facts = usage([10, 90, 10, 10], [98, 0, 97, 10], [1] * 4, [20, 1, 4, 1])
    # 20 and 4 pages of 100 are within a quarter: both stay longest, though they were used long ago.
    assert evicted(cluster_scores(facts)) == [3, 1, 2, 0]
    crowded = usage([10, 90, 10, 10], [98, 0, 97, 10], [1] * 4, [20, 1, 8, 1])
    assert evicted(cluster_scores(crowded))[0] == 2  # beyond the quarter it is a large, old cluster


ACTIONS = ["room", "drop", "withdraw", "pin", "release", "read", "end", "grow"]


@how(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=60))
def test_no_frame_is_allocated_twice_and_none_is_lost(actions):
    frames = FramePool(20, 64)
    last = Tails(frames)
    page_cache = PageCache(frames, cluster_scores, DecodeCounts(), layers=1, heads=1, tails=last)
    pinned, read, number = set(), set(), 0
    for action, amount in actions:
        page_cache.row += 1
        key = (0, 0, amount)
        if action == "room":
            stuck = sum(len(page_cache.frames_of(own)) for own in pinned | read)
            if amount > frames.count - stuck:
                with pytest.raises(InvalidRequest, match="resident_bytes"):
                    page_cache.allocate(amount)
                continue
            page_cache.insert((0, 0, number), page_cache.allocate(amount))
            number += 1
        elif action == "withdraw" and frames.free_count:
            frames.withdraw(min(amount, frames.free_count))
        elif action == "release":
            page_cache.unpin_all()
            pinned.clear()
        elif action == "drop" and key in page_cache and key not in read:
            frames.free(page_cache.remove(key))
            pinned.discard(key)
        elif action == "pin" and key in page_cache:
            page_cache.pin([key])
            pinned.add(key)
        elif action == "read" and key in page_cache:
            page_cache.mark_reading([key])
            read.add(key)
        elif action == "end" and key in read:
            page_cache.unmark_reading([key])
            read.remove(key)
        elif action == "grow" and key in page_cache and frames.free_count:
            page_cache.record_update(key, *frames.allocate(1))
            page_cache.set_unwritten(key, True)
        staying = pinned | read
        assert all(own in page_cache for own in staying)
        here = [(0, 0, n) for n in range(number) if (0, 0, n) in page_cache]
        used = [*last, *(frame for own in here for frame in page_cache.frames_of(own))]
        assert len(used) == len(set(used)) == frames.count - frames.free_count
        assert page_cache.evictable_frames() == sum(
            len(page_cache.frames_of(own)) for own in here if own not in staying
        )


def test_of_clusters_fetched_ahead_those_count_as_unused_that_leave_unasked_for():
    counts = DecodeCounts()
    page_cache = PageCache(FramePool(8, 64), cluster_scores, counts, 1, 1, Tails())
    for number, ahead in enumerate([True, True, False]):
        page_cache.insert((0, 0, number), page_cache.allocate(1), prefetched=ahead)
    page_cache.record_use([(0, 0, 0)])
    for number in range(3):
        page_cache.frames.free(page_cache.remove((0, 0, number)))
    assert counts.prefetch_unused == 1  # the second: it was neither asked for later, nor to begin with


WIDE = Geometry(2, 8, 8, 4096, torch.float32, torch.device("cpu"))
FEW_LARGE = {"mean_entries": 16, "max_entries": 16}


@pytest.mark.parametrize("bound", [190_000, 230_000])
def test_half_filled_pages_are_evicted_when_memory_is_needed(bound):
    """Eight heads of two layers would fill all frames with them; a limit that fits the prompt suffices."""
    with OffloadedCache(WIDE, settings(kv_budget=1_000, resident_bytes=bound, clusters=FEW_LARGE)) as cache:
        text = Text(cache, layers=2, heads=8)
        text.begin(300)
        for _ in range(20):
            query, output = text.step()
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
            assert cache.resident_bytes <= bound
        assert cache.counts.partial_pages > 0


def test_a_limit_that_leaves_too_little_after_the_prompt_is_rejected_with_the_prompt():
    with (
        OffloadedCache(WIDE, settings(kv_budget=1_000, resident_bytes=100_000, clusters=FEW_LARGE)) as cache,
        pytest.raises(InvalidRequest, match=r"allow [0-9]+ bytes more"),
    ):
        Text(cache, layers=2, heads=8).begin(300)


def test_a_window_that_has_shrunk_frees_its_memory():
    with OffloadedCache(geometry(), settings(kv_budget=40)) as cache:
        text = Text(cache)
        text.begin(100)
        before = cache.resident_bytes - cache.shared.store.page_cache.frames.touched_bytes
        text.step(rows=200)
        window = cache.layers[0].recent
        assert sum(part.shape[2] for part in (window._sinks, window._rows)) <= 4 + 3 * max(16, window.entries)
        cache.measure(0)
        assert cache.resident_bytes - cache.shared.store.page_cache.frames.touched_bytes <= before + 4096


def test_frames_withdrawn_for_a_long_pass_are_restored():
    with OffloadedCache(geometry(), settings(kv_budget=40, resident_bytes=120_000)) as cache:
        text, frames = Text(cache), cache.shared.store.page_cache.frames
        text.begin(600)
        for _ in range(5):
            text.step()
        before = frames.count
        text.step(rows=200)
        counts = []
        for _ in range(80):
            text.step()
            counts.append(frames.count)
        assert max(counts[40:]) >= before - 16  # fewer for a while whenever a window grows
        assert cache.counts.peak_resident_bytes <= 120_000


def test_a_prompts_clusters_stay_in_memory_if_they_fit():
    with OffloadedCache(geometry(), settings(kv_budget=1.0)) as cache:
        text = Text(cache)
        text.begin(300)
        before = cache.counts.cluster_reads
        query, output = text.step()
        torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
        assert cache.counts.cluster_reads == before


@pytest.mark.parametrize("reused", range(3))
def test_no_frame_is_lost_when_frames_are_withdrawn_and_restored(reused):
    frames = FramePool(10, 4096)
    used = frames.allocate(4)
    frames.free(used[:reused])
    frames.withdraw(frames.free_count - 1)
    assert (frames.count, frames.free_count) == (5 - reused, 1)
    frames.restore(frames.withdrawn)
    assert (frames.count, frames.withdrawn) == (10, 0)
    rest = frames.allocate(frames.free_count)
    assert sorted([*used[reused:], *rest]) == list(range(10))
