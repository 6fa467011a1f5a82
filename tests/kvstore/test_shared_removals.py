"""Entries removed on this machine are deleted from the shared tier, also after failures and restarts."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvweave.errors import StoreError
from kvweave.kvstore import shared_catalog
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from support.fake_remote_tier import FakeRemoteTier, refusing
from support.store_samples import chunk, eventually, put

CHUNK = digest_tokens(chunk(1).token_ids)
AWAY = refusing("get_many", "put", "delete", "has_many", "sizes")


def opened(folder: Path) -> ChunkStore:
    return ChunkStore(folder, shared="of the test", limit_bytes=10**6)


@pytest.fixture
def store(tier: FakeRemoteTier, tmp_path: Path) -> Iterator[ChunkStore]:
    """A store whose only chunk belongs to a document, and is published."""
    with opened(tmp_path) as store:
        store.own("document", [CHUNK])
        put(store, chunk(1))
        assert eventually(lambda: settled(store))
        assert len(tier.held) == 1
        yield store


def settled(store: ChunkStore) -> bool:
    return store.stats().by_tier["shared"].waiting == 0


def killed(*given: object) -> None:
    raise StoreError("killed before it could confirm the put")


def test_an_entry_recomputed_and_evicted_during_an_outage_can_still_be_withdrawn(
    tier: FakeRemoteTier, store: ChunkStore
) -> None:
    tier.before = AWAY
    store.clear()
    put(store, chunk(1))
    store.set_limit(0)  # evicts it
    tier.before = refusing()
    assert eventually(lambda: settled(store))
    assert len(tier.held) == 1  # as it was
    assert store.stats().by_tier["shared"].entries == 1
    store.disown("document")
    assert eventually(lambda: tier.held == {})
    assert eventually(lambda: store.stats().by_tier["shared"].entries == 0)


def test_an_entry_published_while_another_process_lists_the_tier_can_be_withdrawn(
    tier: FakeRemoteTier, tmp_path: Path
) -> None:
    with opened(tmp_path) as store, opened(tmp_path) as other:
        store.own("document", [CHUNK])
        listing, go_on = threading.Event(), threading.Event()

        def slow_listing(call: str, keys: Sequence[str]) -> None:
            # It is listed a first time for checking each entry.
            if call == "sizes" and threading.current_thread() is verifying and "sizes" in tier.calls:
                listing.set()
                assert go_on.wait(60)

        verifying = threading.Thread(target=other.verify, args=("shared",))
        tier.before = slow_listing
        verifying.start()
        assert listing.wait(60)
        put(store, chunk(1))
        assert eventually(lambda: len(tier.held) == 1 and settled(store))
        go_on.set()
        verifying.join()
        assert store.stats().by_tier["shared"].entries == 1
        store.disown("document")
        assert eventually(lambda: tier.held == {})


def test_an_entry_put_while_another_process_deletes_it_is_deleted_in_the_end(
    tier: FakeRemoteTier, tmp_path: Path
) -> None:
    with opened(tmp_path) as store:
        store.own("document", [CHUNK])
        putting, go_on = threading.Event(), threading.Event()

        def slow_put(call: str, keys: Sequence[str]) -> None:
            if call == "put" and not putting.is_set():
                putting.set()
                assert go_on.wait(60)

        tier.before = slow_put
        put(store, chunk(1))
        assert putting.wait(60)
        with opened(tmp_path) as other:
            assert other.disown("document") == 1
        assert "delete" in tier.calls  # before the put has ended
        go_on.set()
    assert tier.held == {}
    with opened(tmp_path) as store:
        assert settled(store)
        assert store.stats().by_tier["shared"].entries == 0


def test_an_entry_put_while_another_process_clears_the_tier_can_be_withdrawn(
    tier: FakeRemoteTier, tmp_path: Path
) -> None:
    with opened(tmp_path) as store, opened(tmp_path) as other:
        store.own("document", [CHUNK])
        putting, go_on = threading.Event(), threading.Event()

        def slow_put(call: str, keys: Sequence[str]) -> None:
            if call == "put" and not putting.is_set():
                tier.held.update(dict.fromkeys(keys, b"of another machine"))
                putting.set()
                assert go_on.wait(60)

        tier.before = slow_put
        put(store, chunk(1))
        assert putting.wait(60)
        assert other.clear("shared") == 1
        go_on.set()
        assert eventually(lambda: settled(store) and len(tier.held) == 1)
        store.disown("document")
        assert eventually(lambda: tier.held == {})


def test_an_entry_put_by_a_killed_process_after_its_deletion_is_deleted_in_the_end(
    tier: FakeRemoteTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    putting, go_on = threading.Event(), threading.Event()

    def slow_put(call: str, keys: Sequence[str]) -> None:
        if call == "put":
            putting.set()
            assert go_on.wait(60)

    tier.before = slow_put
    with opened(tmp_path) as store, opened(tmp_path) as other:
        store.own("document", [CHUNK])
        monkeypatch.setattr(store.tiers.shared.rows, "confirm_puts", killed)  # type: ignore[union-attr]
        put(store, chunk(1))
        assert putting.wait(60)
        assert other.disown("document") == 1
        assert eventually(lambda: settled(other))
        go_on.set()
        assert eventually(lambda: len(tier.held) == 1)
    opened(tmp_path).close()
    assert len(tier.held) == 1  # the put might still be in progress
    monkeypatch.setattr(shared_catalog, "PUT_TIMEOUT_S", 0.0)
    opened(tmp_path).close()
    assert tier.held == {}
    with opened(tmp_path) as store:
        assert settled(store)


def test_an_entry_put_by_a_killed_process_stays_with_its_document(
    tier: FakeRemoteTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_catalog, "PUT_TIMEOUT_S", 0.0)
    with opened(tmp_path) as store:
        store.own("document", [CHUNK])
        monkeypatch.setattr(store.tiers.shared.rows, "confirm_puts", killed)  # type: ignore[union-attr]
        put(store, chunk(1))
        assert eventually(lambda: len(tier.held) == 1)
    with opened(tmp_path) as store:
        assert eventually(lambda: settled(store))
        assert len(tier.held) == 1
        store.disown("document")
        assert eventually(lambda: tier.held == {})
