"""What stays in memory: frames, the orders in which clusters leave, prefetch, centroids by layer."""

import numpy as np
import pytest
import torch
from driving import Text, geometry, settings
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from kvweave.decode.counters import DecodeCounts
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.page_cache.frames import (
    REPLACEMENTS,
    Frames,
    Known,
    large_and_settled,
    least_frequently_used,
    least_recently_used,
)
from kvweave.decode.page_cache.page_cache import Residents
from kvweave.decode.settings import PageCacheSettings
from kvweave.errors import InvalidRequest
from kvweave.models.support import Geometry


def known(used_at, updated_at, uses, pages, now=100, frames=100) -> Known:
    """Of one layer, which has attended in the current row."""
    arrays = [np.array(values, np.int64) for values in (used_at, updated_at, uses, pages)]
    return Known(*arrays, now - arrays[0], np.zeros(len(pages)), now, frames)


def leaving(order) -> list[int]:
    return np.argsort(-order, kind="stable").tolist()


def test_lru_and_lfu_are_what_their_names_say():
    facts = known([90, 10, 50], [0, 0, 0], [1, 9, 1], [1, 1, 1])
    assert leaving(least_recently_used(facts)) == [1, 2, 0]
    assert leaving(least_frequently_used(facts)) == [2, 0, 1]


def test_of_clusters_used_alike_the_large_ones_leave_first():
    assert leaving(large_and_settled(known([90] * 3, [0] * 3, [1] * 3, [2, 8, 1]))) == [1, 0, 2]


def test_layers_attend_in_turn_so_that_age_is_how_often_a_layer_did_without_a_cluster():
    residents = Residents(Frames(4, 64), "cluster", DecodeCounts(), layers=4, heads=1)
    for layer in range(4):
        residents.turn = layer
        residents.put((layer, 0, 0), residents.room(1))
    residents.next_row()
    for layer in range(2):
        residents.turn = layer
        residents.use([(layer, 0, 0)] if layer else [])
    # The first layer did without its own; of the others, all used when last they could be, the second comes last again.
    gone = []
    for number in range(1, 4):
        before = {(layer, 0, 0) for layer in range(4) if (layer, 0, 0) in residents}
        residents.put((1, 0, number), residents.room(1))
        residents.pin([(1, 0, number)])
        gone += [key[0] for key in before if key not in residents]
    assert gone == [0, 1, 3]


def test_what_the_first_layer_needs_next_stays_while_the_last_attends():
    residents = Residents(Frames(4, 64), "cluster", DecodeCounts(), layers=4, heads=1)
    for layer in range(4):
        residents.turn = layer
        residents.put((layer, 0, 0), residents.room(1))
    residents.pin([(3, 0, 0)])
    residents.room(1)
    assert (0, 0, 0) in residents
    assert (2, 0, 0) not in residents


def test_what_was_fetched_ahead_for_nothing_is_older_than_what_was_used():
    residents = Residents(Frames(3, 64), "cluster", DecodeCounts(), layers=2, heads=1)
    residents.next_row()
    residents.turn = 0
    residents.put((0, 0, 0), residents.room(1))
    for cluster in range(2):
        residents.put((1, 0, cluster), residents.room(1), ahead=True)
    residents.turn = 1
    residents.use([(1, 0, 1)])
    residents.next_row()
    residents.turn = 0
    residents.pin([(0, 0, 0)])
    residents.room(1)
    assert (1, 0, 0) not in residents
    assert (1, 0, 1) in residents


def test_recently_updated_clusters_stay_while_they_take_a_quarter():
    facts = known([10, 90, 10, 10], [98, 0, 97, 10], [1] * 4, [20, 1, 4, 1])
    # 20 and 4 pages of 100 are within a quarter: both stay longest, though they were used long ago.
    assert leaving(large_and_settled(facts)) == [3, 1, 2, 0]
    crowded = known([10, 90, 10, 10], [98, 0, 97, 10], [1] * 4, [20, 1, 8, 1])
    assert leaving(large_and_settled(crowded))[0] == 2  # beyond the quarter it is a large, old cluster


ACTIONS = ["room", "drop", "withdraw", "pin", "release", "read", "end", "grow"]


@how(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=60),
    st.sampled_from(sorted(REPLACEMENTS)),
)
def test_no_frame_is_given_twice_and_none_is_lost(actions, order):
    frames = Frames(20, 64)
    residents = Residents(frames, order, DecodeCounts(), layers=1, heads=1)
    pinned, read, last, number = set(), set(), [], 0
    residents.keep_last = lambda key, frame: last.append(frame)
    residents.outside = lambda: len(last)
    residents.give_outside = lambda: bool(last) and frames.give([last.pop()]) is None
    for action, amount in actions:
        residents.row += 1
        key = (0, 0, amount)
        if action == "room":
            stuck = sum(len(residents.frames_of(own)) for own in pinned | read)
            if amount > frames.count - stuck:
                with pytest.raises(InvalidRequest, match="resident_bytes"):
                    residents.room(amount)
                continue
            residents.put((0, 0, number), residents.room(amount))
            number += 1
        elif action == "withdraw" and frames.free:
            frames.withdraw(min(amount, frames.free))
        elif action == "release":
            residents.release()
            pinned.clear()
        elif action == "drop" and key in residents and key not in read:
            frames.give(residents.drop(key))
            pinned.discard(key)
        elif action == "pin" and key in residents:
            residents.pin([key])
            pinned.add(key)
        elif action == "read" and key in residents:
            residents.begin_reads([key])
            read.add(key)
        elif action == "end" and key in read:
            residents.end_reads([key])
            read.remove(key)
        elif action == "grow" and key in residents and frames.free:
            residents.update(key, *frames.take(1))
            residents.set_unwritten(key, True)
        staying = pinned | read
        assert all(own in residents for own in staying)
        here = [(0, 0, n) for n in range(number) if (0, 0, n) in residents]
        held = [*last, *(frame for own in here for frame in residents.frames_of(own))]
        assert len(held) == len(set(held)) == frames.count - frames.free
        assert residents.evictable() == sum(
            len(residents.frames_of(own)) for own in here if own not in staying
        )


def test_of_clusters_fetched_ahead_those_count_as_unused_that_leave_unasked_for():
    counts = DecodeCounts()
    residents = Residents(Frames(8, 64), "lru", counts, layers=1, heads=1)
    for number, ahead in enumerate([True, True, False]):
        residents.put((0, 0, number), residents.room(1), ahead=ahead)
    residents.use([(0, 0, 0)])
    for number in range(3):
        residents.frames.give(residents.drop((0, 0, number)))
    assert counts.prefetch_unused == 1  # the second: it was neither asked for later, nor to begin with


def decoded(count: int = 60, **changes) -> tuple[DecodeCounts, torch.Tensor]:
    chosen = {"kv_budget": 60, "resident_bytes": 60_000, **changes}
    with OffloadedCache(geometry(3), settings(**chosen)) as held:
        text = Text(held, layers=3, steady=True)
        text.begin(400)
        for _ in range(count):
            _, output = text.step()
        assert held.counts.peak_resident_bytes <= chosen["resident_bytes"]
        return held.counts, output


@pytest.mark.parametrize("candidates", [1.0, 1.5])
def test_prefetch_changes_when_clusters_are_read_and_not_what_is_attended_to(candidates):
    """Static clusters: where clusters are split, a split needs them in memory, and prefetch brings it forward."""
    tight = {"strategy": "static", "resident_bytes": 46_000, "clusters": {"candidates": candidates}}
    ahead, output = decoded(**tight, residency=PageCacheSettings(prefetch=1))
    alone, expected = decoded(**tight, residency=PageCacheSettings(prefetch=0))
    assert ahead.prefetched > 0 == alone.prefetched
    assert ahead.attended == alone.attended
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    assert ahead.ahead_rate > 0 == alone.ahead_rate
    assert ahead.hit_rate + ahead.ahead_rate > 1.5 * alone.hit_rate


@pytest.mark.parametrize("replacement", sorted(REPLACEMENTS))
def test_every_order_keeps_the_bound(replacement):
    counts, _ = decoded(residency=PageCacheSettings(replacement=replacement))
    assert 0 < counts.hit_rate + counts.ahead_rate < 1


def test_paged_centroids_take_one_layers_memory_and_change_nothing():
    paged, output = decoded(count=20, resident_bytes=200_000)
    all_held, expected = decoded(
        count=20, resident_bytes=200_000, residency=PageCacheSettings(representatives="resident")
    )
    assert paged.attended == all_held.attended
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    sizes = {}
    for kind in ("paged", "resident"):
        with OffloadedCache(geometry(3), settings(residency=PageCacheSettings(representatives=kind))) as held:
            text = Text(held, layers=3)
            text.begin(400)
            text.step()
            sizes[kind] = held.parts.representatives.resident_bytes
    assert sizes["paged"] < sizes["resident"] / 2


def test_memory_is_flat_in_the_length_under_an_absolute_budget():
    """What grows is one layer's centroids, taken from the frames; the whole stays what it was."""
    with OffloadedCache(geometry(), settings(kv_budget=60, resident_bytes=60_000)) as held:
        text = Text(held)
        text.begin(100)
        for _ in range(500):
            text.step()
            assert held.resident_bytes <= 60_000
        dense = text.length * 2 * 2 * 8 * 4
        assert held.counts.peak_resident_bytes < dense


WIDE = Geometry(2, 8, 8, 4096, torch.float32, torch.device("cpu"))
FEW_LARGE = {"mean_entries": 16, "max_entries": 16}


@pytest.mark.parametrize("bound", range(90_000, 150_000, 10_000))
def test_half_filled_pages_give_way_where_room_is_needed(bound):
    """Eight heads of two layers would have all frames full of them; a bound that the prompt fits in lasts."""
    with OffloadedCache(WIDE, settings(kv_budget=1.0, resident_bytes=bound, clusters=FEW_LARGE)) as held:
        text = Text(held, layers=2, heads=8)
        text.begin(300)
        for _ in range(20):
            query, output = text.step()
            torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
            assert held.resident_bytes <= bound
        assert held.counts.partial_pages > 0


def test_a_bound_that_the_prompt_leaves_too_little_of_is_refused_with_the_prompt():
    with (
        OffloadedCache(WIDE, settings(kv_budget=1.0, resident_bytes=60_000, clusters=FEW_LARGE)) as held,
        pytest.raises(InvalidRequest, match=r"allow [0-9]+ bytes more"),
    ):
        Text(held, layers=2, heads=8).begin(300)


def test_a_window_that_has_shrunk_gives_its_memory_back():
    with OffloadedCache(geometry(), settings(kv_budget=40)) as held:
        text = Text(held)
        text.begin(100)
        before = held.resident_bytes - held.parts.store.residents.frames.touched_bytes
        text.step(rows=200)
        window = held.layers[0].recent
        assert sum(part.shape[2] for part in (window._first, window._rows)) <= 4 + 3 * max(16, window.held)
        held.look_at(0)
        assert held.resident_bytes - held.parts.store.residents.frames.touched_bytes <= before + 4096


def test_frames_that_a_long_pass_took_come_back():
    with OffloadedCache(geometry(), settings(kv_budget=40, resident_bytes=120_000)) as held:
        text, frames = Text(held), held.parts.store.residents.frames
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
        assert held.counts.peak_resident_bytes <= 120_000


def test_a_prompts_clusters_stay_in_memory_where_there_is_room():
    with OffloadedCache(geometry(), settings(kv_budget=1.0)) as held:
        text = Text(held)
        text.begin(300)
        before = held.counts.copy()
        query, output = text.step()
        torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)
        assert held.counts.since(before).cluster_reads == 0


@pytest.mark.parametrize("trusted", range(3))
def test_frames_are_withdrawn_and_given_back_without_any_lost(trusted):
    frames = Frames(10, 4096)
    used = frames.take(4)
    frames.give(used[:trusted])
    frames.withdraw(frames.free - 1)
    assert (frames.count, frames.free) == (5 - trusted, 1)
    frames.give_back(frames.withdrawn)
    assert (frames.count, frames.withdrawn) == (10, 0)
    rest = frames.take(frames.free)
    assert sorted([*used[trusted:], *rest]) == list(range(10))
