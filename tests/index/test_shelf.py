"""The list of documents: what is on it, in one commit with everything else."""

from pathlib import Path

import pytest

from kvweave.database import Database
from kvweave.index.documents import DocumentTable, ListedDocument, document_id, row_id
from kvweave.types import Chunk, Document


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "kb.sqlite")


def document(source: str, digest: str = "d1") -> Document:
    return Document(source, "Title", "text", digest)


def put(shelf: DocumentTable, listed: Document, *kv_digests: str) -> ListedDocument:
    """List a document with a chunk of three tokens, in prompts four, for each digest."""
    chunks = [Chunk("text", (1, 2, 3), f"text of {digest}") for digest in kv_digests]
    return shelf.put(listed, chunks, kv_digests, [4] * len(chunks))


def kv_digests(shelf: DocumentTable, source: str) -> list[str]:
    return [row.kv_digest for row in shelf.all_chunks() if row.source == source]


def test_put_get_list(database: Database) -> None:
    shelf = DocumentTable(database)
    listed = put(shelf, document("/b"), "x", "y")
    put(shelf, document("/a"))
    assert shelf.get("/b") == listed
    assert (listed.version, listed.digest, listed.title, listed.chunks, listed.tokens) == (
        document_id("/b", "d1"),
        "d1",
        "Title",
        2,
        6,
    )
    assert [one.source for one in shelf.list()] == ["/a", "/b"]
    assert shelf.get("/c") is None
    assert DocumentTable(database).get("/b") == listed


def test_chunks_in_reading_order(database: Database) -> None:
    shelf = DocumentTable(database)
    put(shelf, document("/b"), *(f"c{n}" for n in range(12)))
    put(shelf, document("/c"), "last")
    *rows, last = shelf.all_chunks()
    assert [row.position for row in rows] == list(range(12))
    assert [row.row_id for row in rows] == [row_id(document_id("/b", "d1"), n) for n in range(12)]
    assert (rows[3].source, rows[3].kv_digest, rows[3].kv_tokens) == ("/b", "c3", 4)
    assert (last.source, last.position, last.kv_digest) == ("/c", 0, "last")


def test_chunks_at_places_and_none_where_there_is_none(database: Database) -> None:
    shelf = DocumentTable(database)
    put(shelf, document('/"b"'), *(f"c{n}" for n in range(12)))
    put(shelf, document("/c"), "last")
    places = [("/c", 0), ('/"b"', 3), ('/"b"', 11), ("/c", 1), ("/d", 0)]
    assert {(row.source, row.position, row.kv_digest) for row in shelf.chunks_at(places)} == {
        ("/c", 0, "last"),
        ('/"b"', 3, "c3"),
        ('/"b"', 11, "c11"),
    }
    assert shelf.chunks_at([]) == []


def test_every_chunk_needs_its_kv_digest(database: Database) -> None:
    chunk = Chunk("text", (1, 2, 3), "x")
    with pytest.raises(ValueError, match="shorter"):
        DocumentTable(database).put(document("/a"), [chunk, chunk], ["x"], [4])
    assert DocumentTable(database).list() == []


def test_a_new_version_replaces_the_old_one(database: Database) -> None:
    shelf = DocumentTable(database)
    old = put(shelf, document("/a", "d1"), "x", "y")
    new = put(shelf, document("/a", "d2"), "z")
    assert old.version != new.version
    assert shelf.visible() == {new.version}
    assert kv_digests(shelf, "/a") == ["z"]
    put(shelf, document("/a", "d2"), "z", "w")
    assert kv_digests(shelf, "/a") == ["z", "w"]


def test_remove(database: Database) -> None:
    shelf = DocumentTable(database)
    listed = put(shelf, document("/a"), "x")
    assert shelf.remove("/a") == listed
    assert shelf.remove("/a") is None
    assert (shelf.visible(), shelf.all_chunks(), shelf.list()) == (frozenset(), [], [])


def test_joins_the_callers_transaction(database: Database) -> None:
    shelf = DocumentTable(database)
    kept = put(shelf, document("/a"), "x")

    def interrupted() -> None:
        with database.transaction():
            put(shelf, document("/a", "d2"), "y")
            put(shelf, document("/b"), "z")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert shelf.list() == [kept]
    assert kv_digests(shelf, "/a") == ["x"]


def test_sources_under(database: Database, tmp_path: Path) -> None:
    shelf = DocumentTable(database)
    for name in ("dir/a", "dir/sub/b", "dir2/c", "dir", "d%r/x", "d_r"):
        put(shelf, document(str(tmp_path / name)))

    def under(name: str) -> list[str]:
        return [str(Path(source).relative_to(tmp_path)) for source in shelf.sources_under(tmp_path / name)]

    assert under("dir") == ["dir", "dir/a", "dir/sub/b"]
    assert under("dir/sub/") == ["dir/sub/b"]
    assert under("d%r") == ["d%r/x"]
    assert len(shelf.sources_under("/")) == 6
    assert shelf.sources_under(tmp_path / "nothing") == []


def test_versions_are_named_by_source_and_bytes() -> None:
    assert document_id("/a", "d") == document_id("/a", "d")
    assert len({document_id(*pair) for pair in [("/a", "d"), ("/a", "e"), ("/b", "d"), ("/a,d", "")]}) == 4
