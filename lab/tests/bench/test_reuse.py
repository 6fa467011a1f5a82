"""The simulation of `kvweave bench reuse`, compared with counts by hand and with recipes on a model."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import kvweave
from kvweave.errors import InvalidRequest
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave_lab.bench.reuse import POLICIES, CachePolicy, ReuseCounts, bench_reuse, simulate_cache, sweep
from kvweave_lab.bench.workload import Query, Traffic, draw_queries

PREFIX, ORDERED, ANYWHERE, BOTH = POLICIES
SMALL = Traffic(queries=40, chunks_per_query=4, known_chunks=20, shared_chunks=10)

# Chunks 0, 1 and 2 are known, 5 comes with the third question.
BY_HAND: list[Query] = [(0, 1), (1, 0), (0, 1, 5), (0, 2, 5)]


def test_counts_of_each_cache_for_four_questions() -> None:
    """The comments list the chunks that are found and computed; ! marks those computed again."""
    known = 3
    assert simulate_cache(PREFIX, BY_HAND, known) == ReuseCounts(
        # 0 1 | 1! 0! | found: 0 1, computed: 5 | found: 0, computed: 2 5!
        cache="prefix",
        retrieved=10,
        found=3,
        exact=10,
        stale=0,
        prepared=0,
        computed=7,
        again=3,
        stored=7,
    )
    assert simulate_cache(ORDERED, BY_HAND, known) == ReuseCounts(
        # 0 1 | found: 0 1 | found: 0 1, computed: 5 | found: 0, computed: 5! 2
        cache="ordered prefix",
        retrieved=10,
        found=5,
        exact=10,
        stale=0,
        prepared=0,
        computed=5,
        again=1,
        stored=5,
    )
    assert simulate_cache(ANYWHERE, BY_HAND, known) == ReuseCounts(
        # All are found but 5 at first, which is prepared then; the first chunk of each question is exact.
        cache="anywhere",
        retrieved=10,
        found=9,
        exact=4,
        stale=6,
        prepared=4,
        computed=0,
        again=0,
        stored=4,
    )
    assert simulate_cache(BOTH, BY_HAND, known) == ReuseCounts(
        # found: 0, extended by 1! | found: 0 1 | found: 0 1, extended by 5! | found: 0, extended by 5!, a copy of 2
        cache="both",
        retrieved=10,
        found=7,
        exact=9,
        stale=1,
        prepared=4,
        computed=3,
        again=3,
        stored=7,
    )


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("cap", [1, 3, 7, 30])
def test_a_cap_holds_and_every_chunk_is_counted(policy: CachePolicy, cap: int) -> None:
    free, capped = (
        simulate_cache(policy, draw_queries(SMALL), SMALL.known_chunks, limit) for limit in (None, cap)
    )
    assert capped.stored <= cap
    assert free.stored >= capped.stored
    for counts in (free, capped):
        assert counts.retrieved == SMALL.queries * SMALL.chunks_per_query
        assert counts.exact + counts.stale <= counts.retrieved
        assert counts.found + counts.computed <= counts.retrieved
        assert counts.answering_share(1.0) == (counts.computed + counts.stale) / counts.retrieved
    assert free.computed <= capped.computed


def test_ordering_helps_a_prefix_cache_and_copies_save_all_repeated_work() -> None:
    (point, capped) = bench_reuse([SMALL])
    prefix, ordered, anywhere, both = point.caches
    assert prefix.found < ordered.found < anywhere.found
    assert (point.storage(prefix), point.avoided(prefix)) == (1.0, 0.0)
    assert point.avoided(anywhere) == 1.0
    assert anywhere.exact < both.exact < ordered.exact == ordered.retrieved
    assert capped.cap == anywhere.stored == capped.caches[2].stored


def test_a_sweep_changes_one_setting_at_a_time() -> None:
    points = sweep(SMALL, chunks_per_query=[4, 2], exponents=[1.0, 2.0], shuffled=[0.0], repeated=[0.5])
    assert points == [
        SMALL,
        replace(SMALL, chunks_per_query=2),
        replace(SMALL, exponent=2.0),
        replace(SMALL, shuffled=0.0),
        replace(SMALL, repeated=0.5),
    ]


# Queries


def test_chunks_come_from_the_groups_in_their_shares() -> None:
    traffic = Traffic(queries=1000, chunks_per_query=5)
    queries = draw_queries(traffic)
    assert queries == draw_queries(traffic) != draw_queries(replace(traffic, seed=1))
    assert all(len(set(query)) == 5 for query in queries)
    drawn = Counter(chunk for query in queries for chunk in query)
    known = sum(drawn[chunk] for chunk in range(1000))
    shared = sum(drawn[chunk] for chunk in range(1000, 1500))
    assert known / 5000 == pytest.approx(0.6, abs=0.03)
    assert shared / 5000 == pytest.approx(0.3, abs=0.03)
    unique = [chunk for chunk in drawn if chunk >= 1500]
    assert {drawn[chunk] for chunk in unique} == {1}
    assert known + shared + len(unique) == 5000
    assert drawn[0] > drawn[30] > drawn[900]  # popularity falls with the number


def test_shuffled_and_repeated_shares_are_respected() -> None:
    sorted_queries = draw_queries(replace(SMALL, shuffled=0.0))
    assert all(query == tuple(sorted(query)) for query in sorted_queries)
    assert not all(query == tuple(sorted(query)) for query in draw_queries(SMALL))
    first, *others = draw_queries(replace(SMALL, repeated=1.0))
    limit = SMALL.first_unique
    assert all(
        [min(chunk, limit) for chunk in query] == [min(chunk, limit) for chunk in first] for query in others
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"known_share": 1.2}, "known_share is 1.2"),
        ({"known_share": 0.8, "shared_share": 0.3}, "more than 1 together"),
        ({"chunks_per_query": 11}, "11 chunks per query cannot be drawn"),
        ({"chunks_per_query": 0}, "give 1 to 10"),
    ],
)
def test_impossible_traffic_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        replace(SMALL, **settings)


# Recipes on a model


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return tiny_adapter()


def run_recipe(
    adapter: Adapter, folder: Path, recipe_name: str, queries: list[Query], known: int
) -> ReuseCounts:
    """Return the counts of a recipe that runs on a model with a store."""
    recipe, counts, seen = recipe_named(recipe_name), Counter[str](), set[int]()
    made: set[int] = set()
    prepares = recipe_name != "prefix"
    with kvweave.ChunkStore(folder) as store:

        def prepare(chunks: list[int]) -> None:
            done = kvweave.prepare(adapter, store, [f"chunk {n}" for n in chunks], recipe=recipe, system="S")
            assert done == len(chunks)
            counts["prepared"] += done
            made.update(chunks)

        if prepares:
            prepare(list(range(known)))
        for query in queries:
            new = [chunk for chunk in query if chunk >= known and chunk not in seen]
            seen.update(query)
            if prepares and new:
                prepare(new)
            texts = tuple(f"chunk {number}" for number in query)
            result = kvweave.prefill(adapter, store, kvweave.Prompt("Why?", texts, system="S"), recipe=recipe)
            tainted = False
            for chunk, span in zip(query, result.plan.spans[1:-1], strict=True):
                counts["retrieved"] += 1
                counts["found"] += span.origin != "fresh" and chunk not in new
                counts["stale"] += span.origin == "reused"
                tainted |= span.origin == "reused"
                counts["exact"] += span.origin == "exact" or (span.origin == "fresh" and not tainted)
                counts["computed"] += span.origin == "fresh"
                counts["again"] += span.origin == "fresh" and chunk in made
                made.update([chunk] if span.origin == "fresh" else [])
        stored = store.stats().entries - 1  # without the system prefix
    names = ("retrieved", "found", "exact", "stale", "prepared", "computed", "again")
    return ReuseCounts(recipe_name, **{name: counts[name] for name in names}, stored=stored)


@pytest.mark.parametrize(("policy", "recipe"), [(PREFIX, "prefix"), (ANYWHERE, "reuse")])
def test_the_simulation_counts_what_recipes_do(
    adapter: Adapter, tmp_path: Path, policy: CachePolicy, recipe: str
) -> None:
    numbers = random.Random(3)
    queries = [tuple(numbers.sample(range(7), 3)) for _ in range(12)]
    done = run_recipe(adapter, tmp_path, recipe, queries, known=4)
    assert replace(simulate_cache(policy, queries, 4), cache=recipe) == done
    assert 0 < done.found < done.retrieved
