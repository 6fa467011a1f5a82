"""The measurements of `kvweave bench store`: what they measure, not how fast this machine is."""

from pathlib import Path

import pytest

from kvweave.database import Database
from kvweave.errors import InvalidRequest
from kvweave.kvstore.catalog import Catalog
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.testing import tiny_adapter
from kvweave.types import Storage
from kvweave_lab.bench.measurement import MedianRange, paired_ratios
from kvweave_lab.bench.store import StoreBench, bench_store

STORAGES: list[Storage] = ["exact", "int8"]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return tiny_adapter()


def measured(adapter: Adapter, folder: Path, **changes: int) -> StoreBench:
    """Measure one round with KV in 4 bits; `changes` replace arguments."""
    arguments = {
        "context_tokens": 32,
        "chunk_tokens": 32,
        "rounds": 1,
        "full_rounds": 0,
        "catalog_entries": 0,
    }
    return bench_store(adapter, folder, ["int4"], **{**arguments, **changes})


def test_every_measure_is_taken_once_a_round(adapter: Adapter, tmp_path: Path) -> None:
    done: list[tuple[str, int, int]] = []
    found = bench_store(
        adapter,
        tmp_path,
        STORAGES,
        context_tokens=96,
        chunk_tokens=32,
        rounds=3,
        full_rounds=1,
        catalog_entries=200,
        progress=lambda *reported: done.append(reported),
    )
    assert done == [*(("rounds", number, 3) for number in (1, 2, 3)), ("catalogue", 0, 200)]
    assert (found.context_tokens, found.chunk_tokens, found.rounds) == (96, 32, 3)
    assert found.full_s is not None
    assert [speed.storage for speed in found.storages] == STORAGES
    for speed in found.storages:
        with ChunkStore(tmp_path / speed.storage) as store:
            stats = store.stats()
        assert (stats.entries, stats.tokens, stats.bytes) == (3, 96, speed.bytes)
        assert (stats.hits, stats.misses, stats.damaged) == (
            2 * 3 * 3,
            0,
            0,
        )  # cold and warm, every chunk, every round
        assert 0 < speed.first_layer_s.median <= speed.cold_s.median
        assert speed.of_prefill is not None
        assert speed.of_prefill.high >= (speed.cold_s.low + speed.place_s.low) / found.full_s.median
        for times in (speed.plain_cold_s, speed.plain_warm_s, speed.warm_s, speed.place_s):
            assert 0 < times.low <= times.median <= times.high


def test_look_ups_are_timed_in_a_catalogue_of_the_requested_size(adapter: Adapter, tmp_path: Path) -> None:
    found = measured(adapter, tmp_path, context_tokens=96, catalog_entries=200).catalog
    assert found is not None
    assert (found.entries, found.spans) == (200, 3)
    assert 0 < found.look_up_s.low <= found.look_up_s.median <= found.look_up_s.high
    database = Database(tmp_path / "many" / "catalog.sqlite")
    assert [(of.entries, of.tokens) for of in Catalog(database).totals().values()] == [(200, 200 * 512)]
    database.close()


def test_full_prefill_and_the_catalogue_may_be_left_out(adapter: Adapter, tmp_path: Path) -> None:
    found = measured(adapter, tmp_path)
    assert found.full_s is None
    assert found.catalog is None
    assert found.storages[0].of_prefill is None


def test_a_context_is_made_of_whole_chunks(adapter: Adapter, tmp_path: Path) -> None:
    for tokens in (100, 16):
        with pytest.raises(InvalidRequest, match=f"{tokens} tokens is not made of chunks of 32"):
            measured(adapter, tmp_path, context_tokens=tokens)


def test_a_catalogue_smaller_than_a_look_up_is_refused(adapter: Adapter, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="2 entries does not have 3 to look up"):
        measured(adapter, tmp_path, context_tokens=96, catalog_entries=2)


def test_ratios_are_taken_round_by_round() -> None:
    assert paired_ratios([1.0, 4.0, 3.0], [2.0, 2.0, 1.0]) == MedianRange(median=2.0, low=0.5, high=3.0)
