"""Search by words and by meaning over what is visible, beside other writers."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvweave.errors import KnowledgeBaseMismatch, StoreError
from kvweave.index.documents import document_id, row_id
from kvweave.index.search import fuse_rankings
from kvweave.index.vector_index import VectorIndex
from kvweave.types import Chunk

D = 8
Vectors = npt.NDArray[np.float32]


def chunks(source: str, *texts: str, digest: str = "d") -> list[Chunk]:
    return [Chunk(text, (n,), f"{source}{n}", source, digest, n, n + 1) for n, text in enumerate(texts)]


def axis(*numbers: int) -> Vectors:
    return np.eye(D, dtype=np.float32)[list(numbers)]


def visible(*sources: str) -> frozenset[str]:
    return frozenset(document_id(source, "d") for source in sources)


@pytest.fixture
def bank(tmp_path: Path) -> VectorIndex:
    return VectorIndex(tmp_path / "vectors", D)


def test_words_find_it_though_vectors_disagree_and_the_reverse(bank: VectorIndex) -> None:
    bank.add(chunks("/a", "the zebra crosses", "quarterly revenue", "nothing at all"), axis(0, 1, 2))
    found = bank.search("zebras", axis(1)[0], 2, visible("/a"))
    assert {one.position for one in found} == {0, 1}
    assert bank.search("unheard", axis(2)[0], 1, visible("/a"))[0].text == "nothing at all"
    first = bank.search("revenue", axis(1)[0], 3, visible("/a"))[0]
    assert (first.source, first.position, first.start, first.end) == ("/a", 1, 1, 2)


def test_new_rows_are_found_at_once_by_each_half(bank: VectorIndex, tmp_path: Path) -> None:
    bank.add(chunks("/a", *["common words"] * 50), axis(*[0] * 50))
    bank.sweep(visible("/a"))
    other = VectorIndex(tmp_path / "vectors", D)
    other.add(chunks("/b", "a walrus sleeps", "plain"), axis(1, 2))
    seen = visible("/a", "/b")
    assert bank.search("walrus", axis(0)[0], 60, seen)[0].source == "/b" or any(
        one.text == "a walrus sleeps" for one in bank.search("walrus", axis(0)[0], 5, seen)
    )
    assert bank.search("", axis(2)[0], 1, seen)[0].text == "plain"
    bank.sweep(seen)
    assert any(one.text == "a walrus sleeps" for one in bank.search("walrus", axis(0)[0], 5, seen))


def test_only_visible_rows_take_part_even_if_they_are_few(bank: VectorIndex) -> None:
    for batch in range(10):
        bank.add(chunks(f"/old{batch}", *["the zebra crosses"] * 100), axis(*[0] * 100))
    bank.add(chunks("/new", "a zebra, far away", "unrelated"), axis(5, 6))
    found = bank.search("zebra crosses", axis(0)[0], 5, visible("/new"))
    assert [one.position for one in found] == [0, 1]
    assert found[0].score > found[1].score
    assert bank.search("zebra crosses", axis(0)[0], 5, frozenset()) == []
    assert bank.search("zebra crosses", axis(0)[0], 5, visible("/unknown")) == []
    assert len(bank.search("zebra crosses", axis(0)[0], 150, visible("/old3", "/old4"))) == 150


def test_invisible_rows_cost_no_rank(bank: VectorIndex) -> None:
    bank.add(chunks("/a", "zebra one", "other"), axis(0, 1))
    alone = bank.search("zebra", axis(0)[0], 2, visible("/a"))
    bank.add(chunks("/hidden", *["zebra"] * 30), axis(*[0] * 30))
    assert bank.search("zebra", axis(0)[0], 2, visible("/a")) == alone


def test_equal_scores_come_in_a_fixed_order(bank: VectorIndex) -> None:
    for source in ("/c", "/a", "/b"):
        bank.add(chunks(source, "same", "same"), axis(0, 0))
    found = bank.search("same", axis(0)[0], 6, visible("/a", "/b", "/c"))
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
def test_a_question_is_no_query_language(bank: VectorIndex, question: str) -> None:
    bank.add(chunks("/a", "zebra"), axis(0))
    assert len(bank.search(question, axis(0)[0], 3, visible("/a"))) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(question=st.text())
def test_any_question_is_answered(bank: VectorIndex, question: str) -> None:
    assert bank.search(question, axis(0)[0], 3, visible("/a")) == []


def test_adding_again_replaces(bank: VectorIndex) -> None:
    bank.add(chunks("/a", "one", "two", "three"), axis(0, 1, 2))
    bank.add([*chunks("/b", "x"), *chunks("/a", "new one", "two")], axis(3, 4, 5))
    found = bank.search("", axis(4)[0], 9, visible("/a"))
    assert [one.text for one in found] == ["new one", "two"]
    assert bank.texts([row_id(document_id("/a", "d"), n) for n in range(3)]) == {
        row_id(document_id("/a", "d"), 0): "new one",
        row_id(document_id("/a", "d"), 1): "two",
    }


def test_texts_of_many_rows(bank: VectorIndex) -> None:
    words = [f"text {n} with a 'quote'" for n in range(1500)]
    bank.add(chunks("/it's", *words), np.zeros((1500, D), np.float32))
    names = [row_id(document_id("/it's", "d"), n) for n in range(1500)]
    assert bank.texts([*names, "unknown", "odd'name"]) == dict(zip(names, words, strict=True))
    assert bank.texts([]) == {}


def test_delete_and_sweep(bank: VectorIndex, tmp_path: Path) -> None:
    for source in ("/a", "/b", "/c"):
        bank.add(chunks(source, f"secret{source[1:]}", "more"), axis(0, 1))
    bank.delete(visible("/a"), time.time())
    everything = visible("/a", "/b", "/c")
    assert {one.source for one in bank.search("", axis(0)[0], 9, everything)} == {"/b", "/c"}
    assert bank.sweep(visible("/b")) == 0  # too young: another process may be about to list them
    assert bank.sweep(visible("/b"), grace_s=0) == 2
    assert {one.source for one in bank.search("", axis(0)[0], 9, everything)} == {"/b"}
    files = [path.read_bytes() for path in (tmp_path / "vectors").rglob("*.lance") if path.is_file()]
    assert not any(b"secreta" in data or b"secretc" in data for data in files)
    assert bank.sweep(frozenset(), grace_s=0) == 2
    bank.add(chunks("/a", "again"), axis(0))
    assert [one.text for one in bank.search("again", axis(0)[0], 9, everything)] == ["again"]


def test_a_delete_leaves_what_was_added_again_meanwhile(bank: VectorIndex) -> None:
    bank.add(chunks("/a", "one"), axis(0))
    unlisted_at = time.time()
    bank.add(chunks("/a", "one"), axis(0))  # by another process, before this one gets to deleting
    bank.delete(visible("/a"), unlisted_at)
    assert [one.text for one in bank.search("one", axis(0)[0], 9, visible("/a"))] == ["one"]


def test_lost_rows_can_be_noticed(bank: VectorIndex) -> None:
    bank.add([*chunks("/a", *"abc" * 50), *chunks("/b", "x", digest="e")], axis(*[0] * 151))
    a, b = document_id("/a", "d"), document_id("/b", "e")
    assert bank.rows_by_version() == {a: 150, b: 1}
    bank._table.add(bank._table.search().where(f"version = '{a}'").limit(150).to_arrow())
    bank._table.delete(f"row_id = '{row_id(a, 3)}'")
    assert bank.rows_by_version() == {a: 149, b: 1}  # a row that is there twice stands for no other
    bank.delete([b], time.time())
    assert bank.rows_by_version() == {a: 149}


def test_a_text_in_many_copies_is_found_once(bank: VectorIndex) -> None:
    copies = [
        Chunk(text, (n,), f"digest {n}", f"/copy{copy:03}", "d", n, n + 1)
        for copy in range(100)
        for n, text in enumerate(("the zebra crosses", "quarterly revenue"))
    ]
    bank.add(copies, axis(*[0, 1] * 100))
    bank.add(chunks("/other", "a zebra sleeps", "far away"), axis(2, 3))
    seen = visible(*(f"/copy{copy:03}" for copy in range(100)), "/other")
    found = bank.search("zebra crosses", axis(0)[0], 4, seen)
    assert {one.text for one in found} == {
        "the zebra crosses",
        "quarterly revenue",
        "a zebra sleeps",
        "far away",
    }
    assert (found[0].text, found[0].source) == ("the zebra crosses", "/copy000")
    only_some = bank.search("zebra crosses", axis(0)[0], 4, visible("/copy007", "/copy042"))
    assert [(one.source, one.position) for one in only_some] == [("/copy007", 0), ("/copy007", 1)]


def test_an_empty_bank(bank: VectorIndex) -> None:
    assert bank.search("anything", axis(0)[0], 3, visible("/a")) == []
    bank.add([], np.zeros((0, D), np.float32))
    assert bank.sweep(frozenset(), grace_s=0) == 0
    assert bank.rows_by_version() == {}


def test_vectors_of_another_length(bank: VectorIndex, tmp_path: Path) -> None:
    with pytest.raises(KnowledgeBaseMismatch, match="length 8, this embedding model makes 16"):
        VectorIndex(tmp_path / "vectors", 16)
    with pytest.raises(AssertionError):
        bank.add(chunks("/a", "x"), np.zeros((1, 3), np.float32))


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
bank = VectorIndex(Path(sys.argv[1]), 8)
for batch in range(15):
    for source in (f"/{sys.argv[2]}/{batch}", f"/shared/{batch}"):
        texts = [Chunk(f"zebra {n}", (n,), f"{source}{n}", source, "d") for n in range(4)]
        bank.add(texts, np.zeros((4, 8), np.float32))
    if batch % 5 == 4:
        bank.sweep(frozenset())
"""


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "vectors"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(folder), name]) for name in "pq"]
    assert [writer.wait(timeout=100) for writer in writers] == [0, 0]
    sources = [f"/{name}/{batch}" for name in ("p", "q", "shared") for batch in range(15)]
    found = VectorIndex(folder, D).search("zebra", np.zeros(D, np.float32), 500, visible(*sources))
    assert len(found) == len({(one.source, one.position) for one in found}) == 45 * 4


def test_fusion_by_hand() -> None:
    scores = fuse_rankings([["a", "b"], ["b", "c"]])
    assert scores == pytest.approx({"a": 1 / 61, "b": 1 / 62 + 1 / 61, "c": 1 / 62})
