"""Search by words and by vectors in visible rows, with other writers at work."""

import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvweave.errors import KnowledgeBaseMismatch, StoreError
from kvweave.files import hold_lock
from kvweave.index import vector_index
from kvweave.index.documents import document_version, row_id
from kvweave.index.search import fuse_rankings
from kvweave.index.vector_index import VectorIndex
from kvweave.types import Chunk
from support.processes import Program

D = 8
Vectors = npt.NDArray[np.float32]


def chunks(source: str, *texts: str, digest: str = "d") -> list[Chunk]:
    return [Chunk(text, (n,), f"{source}{n}", source, digest, n, n + 1) for n, text in enumerate(texts)]


def axis(*numbers: int) -> Vectors:
    return np.eye(D, dtype=np.float32)[list(numbers)]


def visible(*sources: str) -> frozenset[str]:
    return frozenset(document_version(source, "d") for source in sources)


@pytest.fixture
def index(tmp_path: Path) -> VectorIndex:
    return VectorIndex(tmp_path / "vectors", D)


def test_what_is_kept_of_earlier_versions_of_a_table_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector_index.lance_session.cache_clear()
    monkeypatch.setitem(vector_index.CACHE_BYTES, "metadata_cache_size_bytes", 200_000)
    try:
        indexes = [VectorIndex(tmp_path / name, D) for name in ("one", "other")]
        for number in range(20):
            for index in indexes:
                index.add(chunks(f"/{number}", "the boat"), axis(0))
                index.search("boat", axis(0)[0], 1, visible(f"/{number}"))
        kept = vector_index.lance_session()
        assert kept.approx_num_items > 0  # else these tables were opened without it
        assert kept.size_bytes < 700_000  # about 2.6 MB without the bound
    finally:
        vector_index.lance_session.cache_clear()


def test_words_find_a_chunk_that_vectors_do_not_and_the_reverse(index: VectorIndex) -> None:
    index.add(chunks("/a", "the zebra crosses", "quarterly revenue", "nothing at all"), axis(0, 1, 2))
    found = index.search("zebras", axis(1)[0], 2, visible("/a"))
    assert {one.position for one in found} == {0, 1}
    assert index.search("unheard", axis(2)[0], 1, visible("/a"))[0].text == "nothing at all"
    first = index.search("revenue", axis(1)[0], 3, visible("/a"))[0]
    assert (first.source, first.position, first.start, first.end) == ("/a", 1, 1, 2)


def test_new_rows_are_found_at_once_by_words_and_by_vectors(index: VectorIndex, tmp_path: Path) -> None:
    index.add(chunks("/a", *["common words"] * 50), axis(*[0] * 50))
    index.sweep(visible("/a"))
    other = VectorIndex(tmp_path / "vectors", D)
    other.add(chunks("/b", "a walrus sleeps", "plain"), axis(1, 2))
    seen = visible("/a", "/b")
    assert index.search("walrus", axis(0)[0], 60, seen)[0].source == "/b" or any(
        one.text == "a walrus sleeps" for one in index.search("walrus", axis(0)[0], 5, seen)
    )
    assert index.search("", axis(2)[0], 1, seen)[0].text == "plain"
    index.sweep(seen)
    assert any(one.text == "a walrus sleeps" for one in index.search("walrus", axis(0)[0], 5, seen))


def test_only_visible_rows_are_found_even_if_they_are_few(index: VectorIndex) -> None:
    for batch in range(10):
        index.add(chunks(f"/old{batch}", *["the zebra crosses"] * 100), axis(*[0] * 100))
    index.add(chunks("/new", "a zebra, far away", "unrelated"), axis(5, 6))
    found = index.search("zebra crosses", axis(0)[0], 5, visible("/new"))
    assert [one.position for one in found] == [0, 1]
    assert found[0].score > found[1].score
    assert index.search("zebra crosses", axis(0)[0], 5, frozenset()) == []
    assert index.search("zebra crosses", axis(0)[0], 5, visible("/unknown")) == []
    assert len(index.search("zebra crosses", axis(0)[0], 150, visible("/old3", "/old4"))) == 150


def test_hidden_rows_take_no_rank(index: VectorIndex) -> None:
    index.add(chunks("/a", "zebra one", "other"), axis(0, 1))
    alone = index.search("zebra", axis(0)[0], 2, visible("/a"))
    index.add(chunks("/hidden", *["zebra"] * 30), axis(*[0] * 30))
    assert index.search("zebra", axis(0)[0], 2, visible("/a")) == alone


def test_equal_scores_have_a_fixed_order(index: VectorIndex) -> None:
    for source in ("/c", "/a", "/b"):
        index.add(chunks(source, "same", "same"), axis(0, 0))
    found = index.search("same", axis(0)[0], 6, visible("/a", "/b", "/c"))
    assert [(one.source, one.position) for one in found] == [
        (s, n) for s in ("/a", "/b", "/c") for n in (0, 1)
    ]


AWKWARD = [
    '"',
    '"open',
    "a AND (",
    "OR NOT",
    "text:zebra",
    "zebra~2^",
    "*",
    "\\",
    "'; DROP",
    "😀",
    "\0",
    "the",
    "",
    " ",
    "a" * 9000,
]


@pytest.mark.parametrize("question", AWKWARD)
def test_a_question_is_no_query_language(index: VectorIndex, question: str) -> None:
    index.add(chunks("/a", "zebra"), axis(0))
    assert len(index.search(question, axis(0)[0], 3, visible("/a"))) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=st.text())
def test_any_question_is_answered(index: VectorIndex, question: str) -> None:
    assert index.search(question, axis(0)[0], 3, visible("/a")) == []


def test_adding_again_replaces(index: VectorIndex) -> None:
    index.add(chunks("/a", "one", "two", "three"), axis(0, 1, 2))
    index.add([*chunks("/b", "x"), *chunks("/a", "new one", "two")], axis(3, 4, 5))
    found = index.search("", axis(4)[0], 9, visible("/a"))
    assert [one.text for one in found] == ["new one", "two"]
    assert index.texts([row_id(document_version("/a", "d"), n) for n in range(3)]) == {
        row_id(document_version("/a", "d"), 0): "new one",
        row_id(document_version("/a", "d"), 1): "two",
    }


def test_texts_of_many_rows(index: VectorIndex) -> None:
    words = [f"text {n} with a 'quote'" for n in range(1500)]
    index.add(chunks("/it's", *words), np.zeros((1500, D), np.float32))
    names = [row_id(document_version("/it's", "d"), n) for n in range(1500)]
    assert index.texts([*names, "unknown", "odd'name"]) == dict(zip(names, words, strict=True))
    assert index.texts([]) == {}


def test_files_of_a_killed_writer_go_with_the_next_sweep_unless_somebody_writes(
    index: VectorIndex, tmp_path: Path
) -> None:
    """LanceDB keeps files that no version names for a week, with text that was removed since."""
    index.add(chunks("/a", "the boat"), axis(0))
    index.sweep(visible("/a"), grace_s=0)
    assert not index.has_old_files
    data = tmp_path / "vectors" / f"{vector_index.TABLE}.lance" / "data"
    left = data / "left-by-a-killed-writer.lance"
    left.write_bytes(next(data.iterdir()).read_bytes())
    assert index.has_old_files
    with hold_lock(tmp_path / "vectors" / "writers.lock", shared=True):
        index.sweep(visible("/a"), grace_s=0)
        assert left.exists()
    index.sweep(visible("/a"), grace_s=0)
    assert not left.exists()
    assert not index.has_old_files
    assert [found.text for found in index.search("boat", axis(0)[0], 1, visible("/a"))] == ["the boat"]


def test_a_file_that_could_not_be_deleted_is_tried_again(index: VectorIndex, tmp_path: Path) -> None:
    """LanceDB does not report it."""
    index.add(chunks("/a", "the boat"), axis(0))
    left = tmp_path / "vectors" / f"{vector_index.TABLE}.lance" / "data" / "left-by-a-killed-writer.lance"
    left.write_bytes(next(left.parent.iterdir()).read_bytes())

    class FailsOnce:
        failed = False

        def __getattr__(self, name: str) -> object:
            return getattr(table, name)

        def optimize(self, **options: object) -> None:
            content = left.read_bytes() if left.exists() else b""
            table.optimize(**options)
            if content and not left.exists() and not self.failed:
                self.failed = bool(left.write_bytes(content))

    table, index.table = index.table, FailsOnce()
    index.sweep(visible("/a"), grace_s=0)
    assert index.table.failed
    assert not left.exists()


def test_opening_an_index_writes_nothing(index: VectorIndex, tmp_path: Path) -> None:
    """A folder that cannot be written to is searched without a warning."""
    index.add(chunks("/a", "the boat"), axis(0))
    (tmp_path / "vectors" / "writers.lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "vectors").rglob("*")}
    again = VectorIndex(tmp_path / "vectors", D)
    assert [found.text for found in again.search("boat", axis(0)[0], 1, visible("/a"))] == ["the boat"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "vectors").rglob("*")} == before


def test_a_table_that_cannot_be_read_right_after_it_was_opened_is_an_error_for_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreadable:
        @property
        def schema(self) -> None:
            raise RuntimeError("lance error: Permission denied")

    monkeypatch.setattr(VectorIndex, "_opened", lambda self, folder: Unreadable())
    with pytest.raises(StoreError, match=r"cannot be opened .*Permission denied"):
        VectorIndex(tmp_path / "vectors", D)


def test_delete_and_sweep(index: VectorIndex, tmp_path: Path) -> None:
    for source in ("/a", "/b", "/c"):
        index.add(chunks(source, f"secret{source[1:]}", "more"), axis(0, 1))
    index.delete(visible("/a"), time.time())
    everything = visible("/a", "/b", "/c")
    assert {one.source for one in index.search("", axis(0)[0], 9, everything)} == {"/b", "/c"}
    assert index.sweep(visible("/b")) == 0  # too young: another process may be about to list them
    assert index.sweep(visible("/b"), grace_s=0) == 2
    assert {one.source for one in index.search("", axis(0)[0], 9, everything)} == {"/b"}
    files = [path.read_bytes() for path in (tmp_path / "vectors").rglob("*.lance") if path.is_file()]
    assert not any(b"secreta" in data or b"secretc" in data for data in files)
    assert index.sweep(frozenset(), grace_s=0) == 2
    index.add(chunks("/a", "again"), axis(0))
    assert [one.text for one in index.search("again", axis(0)[0], 9, everything)] == ["again"]


def test_a_delete_keeps_rows_that_were_added_again_meanwhile(index: VectorIndex) -> None:
    index.add(chunks("/a", "one"), axis(0))
    unlisted_at = time.time()
    index.add(chunks("/a", "one"), axis(0))  # by another process, before this one deletes
    index.delete(visible("/a"), unlisted_at)
    assert [one.text for one in index.search("one", axis(0)[0], 9, visible("/a"))] == ["one"]


def test_lost_rows_are_counted(index: VectorIndex) -> None:
    index.add([*chunks("/a", *"abc" * 50), *chunks("/b", "x", digest="e")], axis(*[0] * 151))
    a, b = document_version("/a", "d"), document_version("/b", "e")
    assert index.rows_by_version() == {a: 150, b: 1}
    index.table.add(index.table.search().where(f"version = '{a}'").limit(150).to_arrow())
    index.table.delete(f"row_id = '{row_id(a, 3)}'")
    assert index.rows_by_version() == {a: 149, b: 1}  # a duplicate does not make up for a lost row
    index.delete([b], time.time())
    assert index.rows_by_version() == {a: 149}


def test_a_text_in_many_copies_is_found_once(index: VectorIndex) -> None:
    copies = [
        Chunk(text, (n,), f"digest {n}", f"/copy{copy:03}", "d", n, n + 1)
        for copy in range(100)
        for n, text in enumerate(("the zebra crosses", "quarterly revenue"))
    ]
    index.add(copies, axis(*[0, 1] * 100))
    index.add(chunks("/other", "a zebra sleeps", "far away"), axis(2, 3))
    seen = visible(*(f"/copy{copy:03}" for copy in range(100)), "/other")
    found = index.search("zebra crosses", axis(0)[0], 4, seen)
    assert {one.text for one in found} == {
        "the zebra crosses",
        "quarterly revenue",
        "a zebra sleeps",
        "far away",
    }
    assert (found[0].text, found[0].source) == ("the zebra crosses", "/copy000")
    only_some = index.search("zebra crosses", axis(0)[0], 4, visible("/copy007", "/copy042"))
    assert [(one.source, one.position) for one in only_some] == [("/copy007", 0), ("/copy007", 1)]


def test_an_empty_index(index: VectorIndex) -> None:
    assert index.search("anything", axis(0)[0], 3, visible("/a")) == []
    index.add([], np.zeros((0, D), np.float32))
    assert index.sweep(frozenset(), grace_s=0) == 0
    assert index.rows_by_version() == {}


def names(source: str, *numbers: int) -> list[str]:
    return [row_id(document_version(source, "d"), number) for number in numbers]


def test_rows_without_a_vector_are_found_by_words_until_it_is_written(index: VectorIndex) -> None:
    seen = visible("/a", "/b")
    index.add(chunks("/a", "a walrus", "the zebra and a walrus", "nothing at all"), None)
    index.add(chunks("/b", "a walrus sleeps", "plain"), axis(0, 1))
    assert index.rows_by_version() == {version: 3 - (version in visible("/b")) for version in seen}
    assert index.nearest(axis(0)[0], 9, seen) == ["a walrus sleeps", "plain"]
    found = {each.text: each.reason for each in index.search("walrus", axis(0)[0], 9, seen)}
    assert {text for text, reason in found.items() if reason.lacks_vector} == {
        "a walrus",
        "the zebra and a walrus",
    }
    assert "nothing at all" not in found
    for _ in range(2):  # the second time after a sweep, which also joins the files
        assert list(index.without_vector(names("/a", 0, 1, 2))) == [
            (name, f"/a{n}") for n, name in enumerate(names("/a", 0, 1, 2))
        ]
        assert index.without_vector(names("/b", 0)) == {}
        index.sweep(seen, grace_s=0)
    rows = [*zip(names("/a", 0, 1), ("/a0", "another text"), strict=True), (names("/c", 0)[0], "/c0")]
    index.write_vectors(rows, axis(2, 3, 4))
    assert list(index.without_vector(names("/a", 0, 1, 2))) == [(names("/a", n)[0], f"/a{n}") for n in (1, 2)]
    (first, *_) = index.search("", axis(2)[0], 1, seen)
    assert (first.text, first.reason.cosine) == ("a walrus", 1.0)
    assert index.sweep(frozenset(), grace_s=0) == 5


def test_a_row_without_a_vector_stands_between_those_that_vectors_confirm_and_others(
    index: VectorIndex,
) -> None:
    near, far = [*axis(0)] * 40, [-axis(0)[0]]
    index.add(chunks("/near", *[f"other {n}" for n in range(39)], "zebra zebra"), np.stack(near))
    index.add(chunks("/far", "zebra far"), np.stack(far))
    index.add(chunks("/new", "zebra and new"), None)
    seen = visible("/near", "/far", "/new")
    found = [each.source for each in index.search("zebra", axis(0)[0], 3, seen)]
    assert found == ["/near", "/new", "/far"]


def test_a_table_of_an_earlier_version_takes_rows_without_a_vector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = vector_index.table_schema(D)
    earlier = [each if each.name != "vector" else each.with_nullable(False) for each in schema]
    with monkeypatch.context() as before:
        before.setattr(vector_index, "table_schema", lambda _: pa.schema(earlier))
        old = VectorIndex(tmp_path / "vectors", D)
        old.add(chunks("/a", "the zebra"), axis(0))
    index, seen = VectorIndex(tmp_path / "vectors", D), visible("/a", "/b", "/c", "/d")
    index.add(chunks("/b", "a zebra with a vector"), axis(1))
    assert not index.table.schema.field("vector").nullable  # nothing is changed without need
    index.add(chunks("/c", "a zebra without one"), None)
    old.add(chunks("/d", "a zebra of the earlier version"), axis(2))
    found = {each.source: each.reason.lacks_vector for each in index.search("zebra", axis(1)[0], 9, seen)}
    assert found == {"/a": False, "/b": False, "/c": True, "/d": False}
    index.write_vectors([(names("/c", 0)[0], "/c0")], axis(3))
    assert index.nearest(axis(3)[0], 1, seen) == ["a zebra without one"]


def test_vectors_of_another_length(index: VectorIndex, tmp_path: Path) -> None:
    with pytest.raises(KnowledgeBaseMismatch, match="length 8, this embedding model makes 16"):
        VectorIndex(tmp_path / "vectors", 16)
    with pytest.raises(AssertionError):
        index.add(chunks("/a", "x"), np.zeros((1, 3), np.float32))


def test_a_damaged_folder(tmp_path: Path) -> None:
    VectorIndex(tmp_path / "vectors", D).add(chunks("/a", "x"), axis(0))
    for path in (tmp_path / "vectors").rglob("*.manifest"):
        path.write_bytes(b"not a manifest")
    with pytest.raises(StoreError, match="cannot be opened"):
        VectorIndex(tmp_path / "vectors", D)


WRITER = """
import sys
import time
from pathlib import Path
import numpy as np
from kvweave.types import Chunk
from kvweave.index.vector_index import VectorIndex
index = VectorIndex(Path(sys.argv[1]), 8)
for batch in range(8):
    for source in (f"/{sys.argv[2]}/{batch}", f"/shared/{batch}"):
        texts = [Chunk(f"zebra {n}", (n,), f"{source}{n}", source, "d") for n in range(4)]
        index.add(texts, np.zeros((4, 8), np.float32))
    if batch % 3 == 2:
        index.sweep(frozenset())
"""


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    with Program(["-c", WRITER, folder, "p"]) as one, Program(["-c", WRITER, folder, "q"]) as other:
        assert (one.wait(timeout=100), other.wait(timeout=100)) == (0, 0)
    sources = [f"/{name}/{batch}" for name in ("p", "q", "shared") for batch in range(8)]
    found = VectorIndex(folder, D).search("zebra", np.zeros(D, np.float32), 500, visible(*sources))
    assert len(found) == len({(one.source, one.position) for one in found}) == 24 * 4


def test_fusion_by_hand() -> None:
    scores = fuse_rankings([["a", "b"], ["b", "c"]])
    assert scores == pytest.approx({"a": 1 / 61, "b": 1 / 62 + 1 / 61, "c": 1 / 62})
