"""What a process holds in memory does not grow with the number of entries that have come and gone."""

import gc
import re
from pathlib import Path

import pytest
from store_samples import ISOLATED, MODEL, chunk, eventually, get, put, same

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens

STATUS = Path("/proc/self/status")
TOKENS, ENTRIES, ROUNDS = 4000, 20, 8
ENTRY_BYTES = chunk(0, tokens=TOKENS).kv.nbytes


def private_bytes() -> int:
    """Memory of this process alone: what is mapped from files the kernel can drop whenever it wants."""
    gc.collect()
    found = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
    assert found
    return int(found.group(1)) * 1024


def use(store: ChunkStore, number: int) -> None:
    """Put, load ahead, find, keep in memory and evict entries that nobody has seen before."""
    for seed in range(number * ENTRIES, (number + 1) * ENTRIES):
        kv = chunk(seed, tokens=TOKENS)
        assert put(store, kv)
        with store.lease() as lease:
            store.prefetch(MODEL, [(digest_tokens(kv.token_ids), [ISOLATED])], lease)
            ((found, _),) = store.find(MODEL, [(kv.token_ids, [ISOLATED])], lease)  # type: ignore[misc]
            assert same(found, kv)
        assert get(store, chunk(10**6 + seed)) is None
    tiers = store._parts.tiers
    assert eventually(lambda: tiers._reads.under_way == 0)


@pytest.mark.skipif(not STATUS.exists(), reason="only Linux tells how much memory is private")
def test_memory_stays_where_it_is_while_entries_come_and_go(tmp_path: Path) -> None:
    limit_bytes = ENTRIES * ENTRY_BYTES // 2
    with ChunkStore(tmp_path, limit_bytes=limit_bytes, host_bytes=limit_bytes) as store:
        for number in range(2):  # until all is imported, and memory as full as it may be
            use(store, number)
        before = private_bytes()
        for number in range(2, 2 + ROUNDS):
            use(store, number)
        grown = private_bytes() - before
        parts = store._parts
        assert parts.tiers.host.residents.used_bytes <= limit_bytes
        assert len(parts.recent._held) <= ENTRIES
        assert parts.pins.in_use() == frozenset()
    assert grown < ROUNDS * ENTRIES * ENTRY_BYTES // 4
