"""The list of documents: what is on it, in one commit with everything else."""

from pathlib import Path

import pytest

from kvweave.core import Chunk, Document
from kvweave.knowledge.shelf import Shelf, document_id, row_id
from kvweave.store.database import Database


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "kb.sqlite")


def document(source: str, digest: str = "d1") -> Document:
    return Document(source, "Title", "text", digest)


def chunks(*digests: str) -> list[Chunk]:
    return [
        Chunk("text", (1, 2, 3), digest, start=n * 10, end=n * 10 + 4) for n, digest in enumerate(digests)
    ]


def test_put_get_list(database: Database) -> None:
    shelf = Shelf(database)
    put = shelf.put(document("/b"), chunks("x", "y"))
    shelf.put(document("/a"), [])
    assert shelf.get("/b") == put
    assert (put.version, put.digest, put.title, put.chunks, put.tokens) == (
        document_id("/b", "d1"),
        "d1",
        "Title",
        2,
        6,
    )
    assert [one.source for one in shelf.list()] == ["/a", "/b"]
    assert shelf.get("/c") is None
    assert Shelf(database).get("/b") == put


def test_chunks_in_reading_order(database: Database) -> None:
    shelf = Shelf(database)
    shelf.put(document("/b"), chunks(*(f"c{n}" for n in range(12))))
    rows = shelf.chunks("/b")
    assert [row.position for row in rows] == list(range(12))
    assert [row.row_id for row in rows] == [row_id(document_id("/b", "d1"), n) for n in range(12)]
    assert (rows[3].digest, rows[3].start, rows[3].end, rows[3].tokens) == ("c3", 30, 34, 3)
    assert shelf.chunks("/nothing") == []
    assert shelf.all_chunks() == rows


def test_a_new_version_replaces_the_old_one(database: Database) -> None:
    shelf = Shelf(database)
    old = shelf.put(document("/a", "d1"), chunks("x", "y"))
    new = shelf.put(document("/a", "d2"), chunks("z"))
    assert old.version != new.version
    assert shelf.visible() == {new.version}
    assert [row.digest for row in shelf.chunks("/a")] == ["z"]
    shelf.put(document("/a", "d2"), chunks("z", "w"))
    assert [row.digest for row in shelf.chunks("/a")] == ["z", "w"]


def test_remove(database: Database) -> None:
    shelf = Shelf(database)
    put = shelf.put(document("/a"), chunks("x"))
    assert shelf.remove("/a") == put
    assert shelf.remove("/a") is None
    assert (shelf.visible(), shelf.chunks("/a"), shelf.list()) == (frozenset(), [], [])


def test_joins_the_callers_transaction(database: Database) -> None:
    shelf = Shelf(database)
    kept = shelf.put(document("/a"), chunks("x"))

    def interrupted() -> None:
        with database.transaction():
            shelf.put(document("/a", "d2"), chunks("y"))
            shelf.put(document("/b"), chunks("z"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert shelf.list() == [kept]
    assert [row.digest for row in shelf.chunks("/a")] == ["x"]


def test_sources_under(database: Database, tmp_path: Path) -> None:
    shelf = Shelf(database)
    for name in ("dir/a", "dir/sub/b", "dir2/c", "dir", "d%r/x", "d_r"):
        shelf.put(document(str(tmp_path / name)), [])

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
