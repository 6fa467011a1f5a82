"""Stored KV that turns out damaged during a request gives the result without that entry."""

from pathlib import Path

import torch

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.testing import tiny_adapter
from support.prepared_texts import TEXTS, origins, prefilled, prepared


def damage(folder: Path, adapter: Adapter, text: str, layer_from_the_end: int) -> None:
    """Flip a bit in one layer of a chunk's KV."""
    ids = torch.tensor(adapter.template.chunk_ids(text)).numpy().tobytes()
    (file,) = [each for each in folder.glob("??/*.safetensors") if ids in each.read_bytes()]
    data = bytearray(file.read_bytes())
    layer_bytes = adapter.encode(adapter.template.chunk_ids(text)).layer(0).nbytes
    data[-layer_from_the_end * layer_bytes + 3] ^= 4
    file.write_bytes(data)


def test_a_request_with_damaged_chunks_gives_the_result_without_them(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    with ChunkStore(tmp_path / "less") as store:
        prepared(adapter, store, (TEXTS[0], TEXTS[2]))
        expected = prefilled(adapter, store)
    with ChunkStore(tmp_path / "all") as store:
        prepared(adapter, store, TEXTS)
    damage(tmp_path / "all", adapter, TEXTS[1], 1)  # in the last layer, after all others have been used
    damage(tmp_path / "all", adapter, TEXTS[3], 3)
    with ChunkStore(tmp_path / "all") as store:
        result = prefilled(adapter, store)
        assert origins(result) == origins(expected) == ["exact", "fresh", "reused", "fresh"]
        assert torch.equal(result.logits, expected.logits)
        assert store.stats().damaged == 2


def test_one_attempt_finds_all_damaged_entries_of_a_request(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    with ChunkStore(tmp_path) as store:
        prepared(adapter, store, TEXTS)
    for text in TEXTS:
        damage(tmp_path, adapter, text, 1)
    passes = []
    compute = adapter.compute
    adapter.compute = lambda *given, **more: (passes.append(1), compute(*given, **more))[1]  # type: ignore[method-assign]
    with ChunkStore(tmp_path) as store:
        assert origins(prefilled(adapter, store)) == ["fresh"] * 4
        assert store.stats().damaged == 4
    assert len(passes) == 2


def test_damage_found_during_selection_is_handled_alike(tmp_path: Path) -> None:
    adapter = tiny_adapter()
    with ChunkStore(tmp_path) as store:
        prepared(adapter, store, TEXTS)
    damage(tmp_path, adapter, TEXTS[1], 1)
    with ChunkStore(tmp_path) as store:
        result = prefilled(adapter, store, "prophetkv", 0.3)
        assert origins(result) == ["exact", "fresh", "reused", "reused"]
        assert store.stats().damaged == 1
