"""A process's memory does not grow with the number of entries that have come and gone."""

import gc
import re
from pathlib import Path

import pytest

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from support.store_samples import ISOLATED, MODEL, chunk, eventually, get, put, same

STATUS = Path("/proc/self/status")
TOKENS, ENTRIES, ROUNDS = 4000, 20, 8
ENTRY_BYTES = chunk(0, tokens=TOKENS).kv.nbytes


def private_bytes() -> int:
    """Memory of this process alone, without mapped files, whose pages the kernel can drop."""
    gc.collect()
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
    assert found
    return int(found.group(1)) * 1024


def use(store: ChunkStore, number: int) -> None:
    """Put, prefetch, find, promote and evict entries that were never used before."""
    for seed in range(number * ENTRIES, (number + 1) * ENTRIES):
        kv = chunk(seed, tokens=TOKENS)
        assert put(store, kv)
        with store.lease() as lease:
            store.prefetch(MODEL, [(digest_tokens(kv.token_ids), [ISOLATED])], lease)
            ((found, _),) = store.find(MODEL, [(kv.token_ids, [ISOLATED])], lease)  # type: ignore[misc]
            assert same(found, kv)
        assert get(store, chunk(10**6 + seed)) is None
    tiers = store.tiers
    assert eventually(lambda: tiers.reads.pending == 0)


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells how much memory is private")
def test_memory_does_not_grow_while_entries_come_and_go(tmp_path: Path) -> None:
    limit_bytes = ENTRIES * ENTRY_BYTES // 2
    with ChunkStore(tmp_path, limit_bytes=limit_bytes, host_bytes=limit_bytes) as store:
        for number in range(2):  # until all modules are imported and the memory tier is full
            use(store, number)
        before = private_bytes()
        for number in range(2, 2 + ROUNDS):
            use(store, number)
        grown = private_bytes() - before
        assert store.tiers.host.used_bytes <= limit_bytes
        assert len(store.tiers.disk.files._recent) <= ENTRIES
        assert store.pins.in_use() == frozenset()
    assert grown < ROUNDS * ENTRIES * ENTRY_BYTES // 4
