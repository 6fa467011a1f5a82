"""Requests on KV of a shared tier that is still being loaded when they start, or whose loading fails."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvweave.errors import TierUnavailable
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.tiers import circuit_breaker, fetching, streaming
from kvweave.kvstore.tiers.leases import Lease
from kvweave.kvstore.tiers.tier import Blob
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache, PlacedSpan
from kvweave.recipes.context import PrepareContext
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkKV
from support.prepared_texts import TEXTS, origins, prefilled, prepared

WAIT_S = 60.0
PIECE_BYTES = 2048  # an entry here has about 10 kB, in three layers


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streaming, fetching):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture
def adapter() -> Adapter:
    return tiny_adapter()


@pytest.fixture
def shared_folder(tmp_path: Path, adapter: Adapter) -> Path:
    """A folder that machines share, with KV of all texts."""
    with ChunkStore(tmp_path / "first", shared=f"file://{tmp_path}/shared") as store:
        prepared(adapter, store, TEXTS)
    return tmp_path / "shared" / "default"


@contextmanager
def machine(tmp_path: Path, before: Callable[[Sequence[ByteRange]], object]) -> Iterator[ChunkStore]:
    """A store with an empty disk and the shared folder; calls `before` before it reads parts of an entry there."""
    with ChunkStore(tmp_path / "second", shared=f"file://{tmp_path}/shared") as store:
        far = store.tiers.shared
        assert far is not None
        tier = far.tier.tier
        read = tier.get_ranges

        def get_ranges(key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
            before(ranges)
            return read(key, ranges)

        tier.get_ranges = get_ranges  # type: ignore[method-assign]
        yield store


def after_first_bytes(ranges: Sequence[ByteRange]) -> bool:
    """Return whether these are not the first bytes of an entry."""
    return ranges[0][0] > 0


def placed(adapter: Adapter, store: ChunkStore, lease: Lease) -> tuple[FusedCache, list[ChunkKV]]:
    """A KV cache with the KV of all texts placed."""
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


def test_kv_loaded_layer_by_layer_gives_bit_identical_logits(
    tmp_path: Path, adapter: Adapter, shared_folder: Path
) -> None:
    with ChunkStore(tmp_path / "first") as store:
        expected = prefilled(adapter, store)
    parts: list[Sequence[ByteRange]] = []
    with machine(tmp_path, parts.append) as store:
        result = prefilled(adapter, store)
    assert origins(result) == origins(expected) == ["exact", "reused", "reused", "reused"]
    assert torch.equal(result.logits, expected.logits)
    assert sum(map(after_first_bytes, parts)) >= len(TEXTS)


def test_a_slow_link_loads_all_layers_before_the_pass_and_a_fast_link_the_first(
    tmp_path: Path, adapter: Adapter, shared_folder: Path
) -> None:
    go_on = threading.Event()

    def hold_back(ranges: Sequence[ByteRange]) -> None:
        time.sleep(0.02)
        if ranges[0][0] > PIECE_BYTES:  # after the piece with the first layer
            assert go_on.wait(WAIT_S)

    with machine(tmp_path, hold_back) as store, store.lease() as lease:
        kv_cache, found = placed(adapter, store, lease)
        kv_cache.load(layer_s=WAIT_S)  # all other layers are still held back
        assert all(kv.layer_wait_s > 0.0 for kv in found)
        loading = threading.Thread(target=lambda: kv_cache.load(layer_s=0.001))
        loading.start()
        loading.join(0.1)
        assert loading.is_alive()
        go_on.set()
        loading.join(WAIT_S)
        assert all(kv.layer_wait_s == 0.0 for kv in found)


def test_a_ready_request_does_not_wait_for_one_with_a_slow_link(
    tmp_path: Path, adapter: Adapter, shared_folder: Path
) -> None:
    with ChunkStore(tmp_path / "first") as store:
        expected = prefilled(adapter, store)
    go_on, waiting = threading.Event(), threading.Event()

    def hold_back(ranges: Sequence[ByteRange]) -> None:
        time.sleep(0.05)
        if after_first_bytes(ranges):
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


@pytest.mark.parametrize("recipe", ["reuse", "prophetkv", "weave", "weave-shifted"])
def test_a_server_that_dies_during_loading_gives_the_result_without_its_entries(
    tmp_path: Path, adapter: Adapter, shared_folder: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No retry while the test runs, even on a slow machine.
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 60.0)
    ratio = 0.0 if recipe == "reuse" else 0.3
    with ChunkStore(tmp_path / "nothing") as store:
        expected = prefilled(adapter, store, recipe, ratio)

    def die(ranges: Sequence[ByteRange]) -> None:
        if after_first_bytes(ranges):
            raise TierUnavailable("unreachable")

    with machine(tmp_path, die) as store:
        result = prefilled(adapter, store, recipe, ratio)
        assert store.stats().damaged == 0
    assert origins(result) == origins(expected) == ["fresh"] * 4
    assert torch.equal(result.logits, expected.logits)
    assert len(list(shared_folder.iterdir())) == 5  # four chunks, and the prefix


@pytest.mark.parametrize("cut", [False, True])
def test_a_damaged_late_layer_gives_the_result_without_that_chunk_stored(
    tmp_path: Path, adapter: Adapter, shared_folder: Path, cut: bool
) -> None:
    with ChunkStore(tmp_path / "less") as store:
        prepared(adapter, store, TEXTS[:1] + TEXTS[2:])
        expected = prefilled(adapter, store)
    ids = torch.tensor(adapter.template.chunk_ids(TEXTS[1])).numpy().tobytes()
    (file,) = [each for each in shared_folder.iterdir() if ids in each.read_bytes()]
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
def test_a_request_retries_once_for_damage_that_the_tier_cannot_delete(
    tmp_path: Path, adapter: Adapter, shared_folder: Path, recipe: str, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.tensor(adapter.template.chunk_ids(TEXTS[0])).numpy().tobytes()
    (file,) = [each for each in shared_folder.iterdir() if ids in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)

    def delete(keys: Iterable[str]) -> None:
        raise TierUnavailable("read only")

    met, found = 0, threading.Event()
    find = ChunkStore.find

    def hold_back(ranges: Sequence[ByteRange]) -> None:
        if after_first_bytes(
            ranges
        ):  # otherwise everything could be loaded, and the damage found, before the request starts
            assert found.wait(WAIT_S)

    with machine(tmp_path, hold_back) as store:
        guarded = store.tiers.shared
        assert guarded is not None
        guarded.tier.tier.delete = delete  # type: ignore[method-assign]

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
    assert caplog.text.count("retrying without an entry") == 1
    assert file.exists()
