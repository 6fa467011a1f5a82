"""Requests on KV of a shared tier that is still coming when they begin, or that does not come to its end."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_damage import TEXTS, origins, prefilled, prepared

from kvweave.errors import TierUnavailable
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.tiers import circuit_breaker as guarded
from kvweave.kvstore.tiers import replication as shared
from kvweave.kvstore.tiers import streaming as arriving
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.tier import Blob, Range
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkKV

WAIT_S = 60.0
PIECE_BYTES = 2048  # an entry here has about 10 kB, in three layers


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (arriving, shared):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def adapter() -> Adapter:
    return tiny_adapter()


@pytest.fixture
def away(tmp_path: Path, adapter: Adapter) -> Path:
    """A folder that machines share, with KV of all texts."""
    with ChunkStore(tmp_path / "first", shared=f"file://{tmp_path}/shared") as store:
        prepared(adapter, store, TEXTS)
    return tmp_path / "shared" / "default"


@contextmanager
def machine(tmp_path: Path, before: Callable[[Sequence[Range]], object]) -> Iterator[ChunkStore]:
    """A store that has nothing but that folder; `before` is called before parts of an entry are read there."""
    with ChunkStore(tmp_path / "second", shared=f"file://{tmp_path}/shared") as store:
        far = store._parts.tiers.shared
        assert far is not None
        tier = far.tier._tier
        read = tier.get_ranges

        def get_ranges(key: str, ranges: Sequence[Range]) -> list[Blob] | None:
            before(ranges)
            return read(key, ranges)

        tier.get_ranges = get_ranges  # type: ignore[method-assign]
        yield store


def behind(ranges: Sequence[Range]) -> bool:
    """Whether these are not the first bytes of an entry."""
    return ranges[0][0] > 0


def placed(adapter: Adapter, store: ChunkStore, lease: Lease) -> tuple[FusedCache, list[ChunkKV]]:
    """A canvas behind the KV of all texts."""
    ctx = PrepareContext(adapter, store, adapter.template.prefix_ids(None))
    chunks = [tuple(adapter.template.chunk_ids(text)) for text in TEXTS]
    prepare = recipe_named("reuse").prepare
    wanted = [(ids, prepare.provenances(adapter, ctx.prefix, len(ids))) for ids in chunks]
    found = [one[0] for one in store.find(adapter.fingerprint, wanted, lease) if one is not None]
    assert len(found) == len(TEXTS)
    spans, start = [], 0
    for kv in found:
        spans.append(PlacedSpan(kv, start, start))
        start += kv.tokens
    return adapter.new_cache(start + 4, spans), found


def test_what_comes_layer_by_layer_gives_the_same_answer_to_the_bit(
    tmp_path: Path, adapter: Adapter, away: Path
) -> None:
    with ChunkStore(tmp_path / "first") as store:
        expected = prefilled(adapter, store)
    parts: list[Sequence[Range]] = []
    with machine(tmp_path, parts.append) as store:
        result = prefilled(adapter, store)
    assert origins(result) == origins(expected) == ["exact", "reused", "reused", "reused"]
    assert torch.equal(result.logits, expected.logits)
    assert sum(map(behind, parts)) >= len(TEXTS)


def test_on_a_slow_link_everything_is_read_before_the_pass_and_on_a_fast_one_the_first_layer(
    tmp_path: Path, adapter: Adapter, away: Path
) -> None:
    go_on = threading.Event()

    def hold_back(ranges: Sequence[Range]) -> None:
        time.sleep(0.02)
        if ranges[0][0] > PIECE_BYTES:  # behind the piece with the first layer
            assert go_on.wait(WAIT_S)

    with machine(tmp_path, hold_back) as store, store.lease() as lease:
        kv_cache, found = placed(adapter, store, lease)
        kv_cache.load(layer_s=WAIT_S)  # all other layers are still held back
        assert all(kv.awaited_s > 0.0 for kv in found)
        loading = threading.Thread(target=lambda: kv_cache.load(layer_s=0.001))
        loading.start()
        loading.join(0.1)
        assert loading.is_alive()
        go_on.set()
        loading.join(WAIT_S)
        assert all(kv.awaited_s == 0.0 for kv in found)


def test_a_ready_request_does_not_wait_for_one_whose_layers_come_slowly(
    tmp_path: Path, adapter: Adapter, away: Path
) -> None:
    with ChunkStore(tmp_path / "first") as store:
        expected = prefilled(adapter, store)
    go_on, waiting = threading.Event(), threading.Event()

    def hold_back(ranges: Sequence[Range]) -> None:
        time.sleep(0.05)
        if behind(ranges):
            waiting.set()
            assert go_on.wait(WAIT_S)

    found = []
    with machine(tmp_path, hold_back) as slow, ChunkStore(tmp_path / "first") as ready:
        waits = threading.Thread(target=lambda: found.append(prefilled(adapter, slow)))
        waits.start()
        assert waiting.wait(WAIT_S)
        assert torch.equal(prefilled(adapter, ready).logits, expected.logits)
        assert not found
        go_on.set()
        waits.join(WAIT_S)
        assert torch.equal(found[0].logits, expected.logits)


@pytest.mark.parametrize("recipe", ["reuse", "prophetkv", "weave"])
def test_a_server_that_dies_in_the_middle_leaves_the_answer_that_would_be_computed_without_it(
    tmp_path: Path, adapter: Adapter, away: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not tried again while the test runs, however slow it is.
    monkeypatch.setattr(guarded, "FIRST_REST_S", 60.0)
    ratio = 0.0 if recipe == "reuse" else 0.3
    with ChunkStore(tmp_path / "nothing") as store:
        expected = prefilled(adapter, store, recipe, ratio)

    def die(ranges: Sequence[Range]) -> None:
        if behind(ranges):
            raise TierUnavailable("away")

    with machine(tmp_path, die) as store:
        result = prefilled(adapter, store, recipe, ratio)
        assert store.stats().damaged == 0
    assert origins(result) == origins(expected) == ["fresh"] * 4
    assert torch.equal(result.logits, expected.logits)
    assert len(list(away.iterdir())) == 5  # four chunks, and the prefix


@pytest.mark.parametrize("cut", [False, True])
def test_an_altered_or_truncated_late_layer_is_as_if_that_chunk_had_never_been_stored(
    tmp_path: Path, adapter: Adapter, away: Path, cut: bool
) -> None:
    with ChunkStore(tmp_path / "less") as store:
        prepared(adapter, store, TEXTS[:1] + TEXTS[2:])
        expected = prefilled(adapter, store)
    ids = torch.tensor(adapter.template.chunk_ids(TEXTS[1])).numpy().tobytes()
    (file,) = [each for each in away.iterdir() if ids in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data[:-10] if cut else data)
    with machine(tmp_path, lambda ranges: None) as store:
        result = prefilled(adapter, store)
        assert store.stats().damaged == 1
        assert not file.exists()
    assert origins(result) == origins(expected) == ["exact", "fresh", "reused", "reused"]
    assert torch.equal(result.logits, expected.logits)


@pytest.mark.parametrize("recipe", ["reuse", "prophetkv"])
def test_damage_that_cannot_be_deleted_there_is_met_once_by_a_request(
    tmp_path: Path, adapter: Adapter, away: Path, recipe: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor(adapter.template.chunk_ids(TEXTS[0])).numpy().tobytes()
    (file,) = [each for each in away.iterdir() if ids in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)

    def delete(keys: Iterable[str]) -> None:
        raise TierUnavailable("to be read only")

    met, found = 0, threading.Event()
    find = ChunkStore.find

    def hold_back(ranges: Sequence[Range]) -> None:
        if behind(ranges):  # or all is there, and the damage met, before the request begins
            assert found.wait(WAIT_S)

    with machine(tmp_path, hold_back) as store:
        guarded = store._parts.tiers.shared
        assert guarded is not None
        guarded.tier._tier.delete = delete  # type: ignore[method-assign]

        def find_a_few_times(*given: Any) -> Any:
            nonlocal met
            met += 1
            assert met <= 3
            taken = find(store, *given)
            found.set()
            return taken

        store.find = find_a_few_times  # type: ignore[method-assign]
        result = prefilled(adapter, store, recipe, 0.0 if recipe == "reuse" else 0.3)
    assert origins(result)[0] == "fresh"
    assert caplog.text.count("starting anew") == 1
    assert file.exists()
