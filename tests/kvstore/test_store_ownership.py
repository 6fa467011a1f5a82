from pathlib import Path

import pytest

from kvweave.database import Database
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.types import KVProvenance
from support.store_samples import MODEL, SYSTEM, chunk, entry_files, get, put, same

A, B, C = chunk(1), chunk(2), chunk(3)
a, b, c = (digest_tokens(kv.token_ids) for kv in (A, B, C))


def test_an_entry_is_dropped_with_the_last_owner_of_its_chunk(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, A)
        put(store, B)
        store.own("one", [a, b])
        store.own("two", [b])
        get(store, A)
        assert store.disown("one") == 1
        assert get(store, A) is None
        assert same(get(store, B), B)
        assert len(entry_files(tmp_path)) == 1
        assert store.disown("two") == 1
        assert entry_files(tmp_path) == []


def test_an_entry_is_dropped_with_any_chunk_of_its_context(tmp_path: Path) -> None:
    after_a = KVProvenance("observed", (SYSTEM, a))
    after_c = KVProvenance("observed", (SYSTEM, c))
    with ChunkStore(tmp_path) as store:
        put(store, B)
        put(store, B, after_a, a)
        put(store, B, after_c, c)
        store.own("document of a", [a])
        store.own("document of b", [b])
        assert store.disown("document of a") == 1
        assert get(store, B, after_a) is None
        assert get(store, B) is not None
        assert get(store, B, after_c) is not None  # c has no owner and never had one
        assert store.disown("document of b") == 2
        assert store.stats().entries == 0


def test_entries_of_callers_without_documents_stay(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, A)
        store.own("document", [b])
        assert store.disown("document") == 0
        assert store.disown("document") == store.disown("unknown") == 0
        assert get(store, A) is not None


def test_a_changed_document_keeps_what_its_versions_share(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, A)
        put(store, B)
        put(store, C)
        store.own("version 1", [a, b])
        store.own("version 2", [b])
        store.own("version 2", [c, c])  # added to what it has; twice counts once
        assert store.disown("version 1") == 1
        assert [get(store, kv) is not None for kv in (A, B, C)] == [False, True, True]


def test_owners_of_another_namespace_change_nothing(tmp_path: Path) -> None:
    with ChunkStore(tmp_path, namespace="one") as one, ChunkStore(tmp_path, namespace="two") as two:
        for store in (one, two):
            put(store, A)
            store.own("document", [a])
        assert one.disown("document") == 1
        assert get(one, A) is None
        assert get(two, A) is not None


def test_clearing_keeps_ownership(tmp_path: Path) -> None:
    with ChunkStore(tmp_path) as store:
        put(store, A)
        store.own("document", [a])
        store.clear()
        put(store, A)
        assert store.disown("document") == 1


def test_in_a_shared_transaction_files_are_deleted_only_after_the_commit(tmp_path: Path) -> None:
    database = Database(tmp_path / "kb.sqlite")
    with ChunkStore(tmp_path, database=database) as store:
        put(store, A)
        store.own("document", [a])

        def remove_and_fail() -> None:
            with database.transaction():
                store.disown("document")
                assert entry_files(tmp_path)
                raise RuntimeError("the vectors could not be removed")

        with pytest.raises(RuntimeError):
            remove_and_fail()
        assert same(get(store, A), A)
        with database.transaction():
            assert store.disown("document") == 1
            assert entry_files(tmp_path)
        assert entry_files(tmp_path) == []
    database.close()


def test_kv_of_a_document_removed_meanwhile_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    after_a = KVProvenance("observed", (SYSTEM, a))
    with ChunkStore(tmp_path, owned_only=True) as store, ChunkStore(tmp_path, namespace="two") as other:
        assert store.put(MODEL, A, KVProvenance("bare", ()), [])  # the system prefix has no owner
        other.own("document", [b])
        assert not put(store, B)
        store.own("document", [b])
        assert put(store, B)
        assert not put(store, B, after_a, a)
        store.own("document of a", [a])

        write = store.tiers.disk.files.write

        def removed_meanwhile(*args: object) -> str:
            name = write(*args)  # type: ignore[arg-type]
            other_process.disown("document of a")
            return name

        monkeypatch.setattr(store.tiers.disk.files, "write", removed_meanwhile)
        with ChunkStore(tmp_path) as other_process:
            assert not put(store, B, after_a, a)
        assert store.stats().entries == len(entry_files(tmp_path)) == 2
        assert caplog.text == ""
