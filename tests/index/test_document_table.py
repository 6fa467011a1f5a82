"""The list of documents: what it holds, in one commit with everything else."""

from pathlib import Path

import pytest

from kvweave.database import Database
from kvweave.index.documents import DocumentTable, ListedDocument, document_version, row_id
from kvweave.types import Chunk, Document


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "kb.sqlite")


def document(source: str, digest: str = "d1") -> Document:
    return Document(source, "Title", "text", digest)


def put(table: DocumentTable, listed: Document, *kv_digests: str) -> ListedDocument:
    """List a document with a chunk of three tokens, in prompts four, for each digest."""
    chunks = [Chunk("text", (1, 2, 3), f"text of {digest}") for digest in kv_digests]
    return table.put(listed, chunks, kv_digests, [4] * len(chunks))


def kv_digests(table: DocumentTable, source: str) -> list[str]:
    return [row.kv_digest for row in table.all_chunks() if row.source == source]


def test_put_get_and_all_documents(database: Database) -> None:
    table = DocumentTable(database)
    listed = put(table, document("/b"), "x", "y")
    put(table, document("/a"))
    assert table.get("/b") == listed
    assert (listed.version, listed.digest, listed.title, listed.chunks, listed.tokens) == (
        document_version("/b", "d1"),
        "d1",
        "Title",
        2,
        6,
    )
    assert [one.source for one in table.all_documents()] == ["/a", "/b"]
    assert table.get("/c") is None
    assert DocumentTable(database).get("/b") == listed


def test_chunks_in_reading_order(database: Database) -> None:
    table = DocumentTable(database)
    put(table, document("/b"), *(f"c{n}" for n in range(12)))
    put(table, document("/c"), "last")
    *rows, last = table.all_chunks()
    assert [row.position for row in rows] == list(range(12))
    assert [row.row_id for row in rows] == [row_id(document_version("/b", "d1"), n) for n in range(12)]
    assert (rows[3].source, rows[3].kv_digest, rows[3].kv_tokens) == ("/b", "c3", 4)
    assert (last.source, last.position, last.kv_digest) == ("/c", 0, "last")


def test_chunks_at_places_that_may_not_exist(database: Database) -> None:
    table = DocumentTable(database)
    put(table, document('/"b"'), *(f"c{n}" for n in range(12)))
    put(table, document("/c"), "last")
    places = [("/c", 0), ('/"b"', 3), ('/"b"', 11), ("/c", 1), ("/d", 0)]
    assert {(row.source, row.position, row.kv_digest) for row in table.chunks_at(places)} == {
        ("/c", 0, "last"),
        ('/"b"', 3, "c3"),
        ('/"b"', 11, "c11"),
    }
    assert table.chunks_at([]) == []


def test_every_chunk_needs_its_kv_digest(database: Database) -> None:
    chunk = Chunk("text", (1, 2, 3), "x")
    with pytest.raises(ValueError, match="shorter"):
        DocumentTable(database).put(document("/a"), [chunk, chunk], ["x"], [4])
    assert DocumentTable(database).all_documents() == []


def test_a_new_version_replaces_the_old_one(database: Database) -> None:
    table = DocumentTable(database)
    old = put(table, document("/a", "d1"), "x", "y")
    new = put(table, document("/a", "d2"), "z")
    assert old.version != new.version
    assert table.visible_versions() == {new.version}
    assert kv_digests(table, "/a") == ["z"]
    put(table, document("/a", "d2"), "z", "w")
    assert kv_digests(table, "/a") == ["z", "w"]


def test_remove(database: Database) -> None:
    table = DocumentTable(database)
    listed = put(table, document("/a"), "x")
    assert table.remove("/a") == listed
    assert table.remove("/a") is None
    assert (table.visible_versions(), table.all_chunks(), table.all_documents()) == (frozenset(), [], [])


def test_writes_join_the_callers_transaction(database: Database) -> None:
    table = DocumentTable(database)
    listed = put(table, document("/a"), "x")

    def interrupted() -> None:
        with database.transaction():
            put(table, document("/a", "d2"), "y")
            put(table, document("/b"), "z")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert table.all_documents() == [listed]
    assert kv_digests(table, "/a") == ["x"]


def test_sources_under(database: Database, tmp_path: Path) -> None:
    table = DocumentTable(database)
    for name in ("dir/a", "dir/sub/b", "dir2/c", "dir", "d%r/x", "d_r"):
        put(table, document(str(tmp_path / name)))

    def under(name: str) -> list[str]:
        return [str(Path(source).relative_to(tmp_path)) for source in table.sources_under(tmp_path / name)]

    assert under("dir") == ["dir", "dir/a", "dir/sub/b"]
    assert under("dir/sub/") == ["dir/sub/b"]
    assert under("d%r") == ["d%r/x"]
    assert len(table.sources_under("/")) == 6
    assert table.sources_under(tmp_path / "nothing") == []


def test_versions_are_named_by_source_and_bytes() -> None:
    assert document_version("/a", "d") == document_version("/a", "d")
    assert (
        len({document_version(*pair) for pair in [("/a", "d"), ("/a", "e"), ("/b", "d"), ("/a,d", "")]}) == 4
    )
