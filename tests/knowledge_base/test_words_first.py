"""Documents that are searched by their words until their vectors are there: ranking, order of the work, interruptions."""

import threading
import time

import pytest

from kvweave.documents import chunk_preparation, indexing
from kvweave.errors import KnowledgeBaseError
from kvweave.index.vector_index import VectorIndex
from kvweave.state.knowledge_base_state import no_progress
from support import tiny_kb

BATCH = 4
QUESTION = "the north of Note 3"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(indexing, "BATCH_CHUNKS", BATCH)
    monkeypatch.setattr(chunk_preparation, "embedded_chunks", lambda: BATCH)


@pytest.fixture
def documents(tmp_path):
    return written(tmp_path / "documents", 6)


def written(folder, count):
    """Documents of three chunks each."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(tiny_kb.text(number))
    return folder


def open_tiny(home, **settings):
    return tiny_kb.open_tiny(home, chunk_tokens=60, **settings)


@pytest.fixture
def base(tiny, tmp_path):
    with open_tiny(tmp_path / "home") as found:
        yield found


def ranked(base, question=QUESTION):
    return [
        (each.source.document, each.source.start, each.source.score)
        for each in base.explained_passages(question, 9)
    ]


def without_vector(base):
    """How many rows of listed chunks have no vector in the index."""
    return len(
        base.components.index.without_vector([row.row_id for row in base.state.documents.all_chunks()])
    )


def test_many_chunks_are_found_by_their_words_before_they_are_embedded(base, documents, tmp_path):
    texts = []
    encode = base.encoder.encode
    base.encoder.encode = lambda given: texts.extend(given) or encode(given)
    report = base.add(documents, wait=False)
    assert (report.chunks, report.vectors_waiting, report.chunk_kv_waiting) == (18, 18, 18)
    assert texts == []
    found = base.explained_passages(QUESTION, 9)
    assert found[0].source.document == str(documents / "3.txt")
    assert all(each.lacks_vector and each.vector_rank is None for each in found)
    answer = base.ask(QUESTION, cache="off")
    assert answer.text
    assert answer.plan.without_vector == 18
    status = base.preparation.status()
    assert (status.left, status.left_without_vector, status.most_left_s) == (18, 18, None)

    stages = []
    done = base.prepare(lambda stage, *_: stages.append((stage, base.state.documents.without_vector_count())))
    assert (done.embedded, done.computed) == (18, 18)
    names = [stage for stage, _ in stages]
    assert names == sorted(names, reverse=True)  # all vectors before any KV
    assert [left for stage, left in stages if stage == "embedding"] == [18, 14, 10, 6, 2, 0]
    assert without_vector(base) == 0
    assert base.preparation.status().left == 0
    assert base.ask(QUESTION, cache="off").plan.without_vector == 0
    with open_tiny(tmp_path / "other") as at_once:
        assert at_once.add(documents).vectors_waiting == 0
        assert ranked(base) == ranked(at_once)
    assert base.add(documents, wait=False).vectors_waiting == 0


def test_few_chunks_are_embedded_at_once(base, documents):
    report = base.add(documents / "0.txt", wait=False)
    assert (report.chunks, report.vectors_waiting, report.chunk_kv_waiting) == (3, 0, 3)
    assert without_vector(base) == 0


def test_whoever_waits_finishes_what_an_earlier_add_has_left(base, documents):
    base.add(documents, wait=False)
    assert base.add(documents).chunk_kv_computed == 18
    assert without_vector(base) == base.state.documents.without_vector_count() == 0


def test_idle_time_embeds_where_the_model_needs_nothing_else(base, documents):
    base.store.set_limit(0)  # no KV fits
    assert base.add(documents, wait=False).chunk_kv_waiting == 18
    assert base.idle().jobs["preparation"] == 18
    assert base.preparation.since_s == 0


def test_other_background_work_waits_for_the_vectors(base, documents):
    base.add(documents, wait=False)
    with base.preparation.working():  # as another process does
        assert base.idle().ended == "18 chunks have no vector yet"
    assert base.idle().jobs["preparation"] == 18


def test_part_of_the_vectors_neither_hides_nor_favours_the_other_chunks(base, documents):
    base.add(documents, wait=False)

    def stop(stage, done, total):
        if done == 2 * BATCH:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base.prepare(stop)
    assert base.preparation.status().left_without_vector == without_vector(base) == 18 - 2 * BATCH
    found = base.explained_passages("Note 5", 18)
    assert found[0].source.document == str(documents / "5.txt")  # by its words alone
    assert found[0].lacks_vector
    assert {each.lacks_vector for each in found} == {True, False}
    assert base.add(documents, wait=False).vectors_waiting == 18 - 2 * BATCH
    base.prepare()
    assert without_vector(base) == 0


def test_chunks_go_with_their_document_and_come_again(base, documents):
    base.add(documents, wait=False)
    base.remove(documents / "0.txt")
    assert base.preparation.status().left_without_vector == 15
    base.remove_all()
    assert base.preparation.status().left_without_vector == 0
    base.add(documents, wait=False)
    assert base.prepare().embedded == 18


def test_a_chunk_that_is_added_again_meanwhile_is_not_taken_for_embedded(
    base, documents, tmp_path, monkeypatch
):
    base.add(documents, wait=False)
    twice, write = (documents / "0.txt", documents / "1.txt"), VectorIndex.write_vectors

    def write_and_add_again(index, rows, vectors):
        write(index, rows, vectors)
        monkeypatch.undo()
        with open_tiny(tmp_path / "home") as other:
            other.remove(*twice)
            monkeypatch.setattr(indexing, "BATCH_CHUNKS", BATCH)
            assert other.add(*twice, wait=False).vectors_waiting == 18

    monkeypatch.setattr(VectorIndex, "write_vectors", write_and_add_again)
    assert base.prepare().embedded == 18 + BATCH
    assert without_vector(base) == base.state.documents.without_vector_count() == 0
    assert base.lost_documents() == []


def test_two_at_once_embed_everything_and_disturb_no_third_that_adds(base, documents, tmp_path):
    base.add(documents, wait=False)
    together, failed = threading.Barrier(3), []

    def work(do):
        with open_tiny(tmp_path / "home") as other:
            together.wait(30)
            try:
                do(other)
            except Exception as error:
                failed.append(error)

    more = written(tmp_path / "more", 2)
    works = [lambda other: other.preparer.embed(no_progress)] * 2 + [
        lambda other: other.add(more, wait=False)
    ]
    threads = [threading.Thread(target=work, args=(each,)) for each in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    base.prepare()
    assert without_vector(base) == base.state.documents.without_vector_count() == 0
    with open_tiny(tmp_path / "other") as at_once:
        at_once.add(documents, more)
        assert ranked(base) == ranked(at_once)


def test_an_answer_from_words_alone_is_checked_once_vectors_are_there(tiny, tmp_path):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.txt").write_text("zzzzzz walnut zzzzzz walnut zzzzzz walnut zzzzzz walnut zzzzzz.")
    for number in range(8):  # near to the question by their letters
        (folder / f"{number}.txt").write_text(f"The walnut, a tuna, a nut, all want a tuna {number}.")
    with open_tiny(tmp_path / "home", top_k=1) as base:
        base.add(folder, wait=False)
        (before,) = base.ask("walnut").sources
        assert before.document == str(folder / "a.txt")
        assert base.ask("walnut").plan.cache_hit is not None
        base.prepare()
        again = base.ask("walnut")
        assert again.plan.cache_hit is None
        assert again.sources[0].document != before.document
        assert base.ask("walnut").plan.cache_hit is not None


def test_a_lost_index_ends_the_work_and_an_add_repairs_it(base, documents, tmp_path):
    base.add(documents, wait=False)
    versions = [each.version for each in base.documents()]
    base.components.index.delete(versions, before_s=time.time() + 1)
    assert base.prepare().embedded == 0
    with pytest.raises(KnowledgeBaseError, match="add"):
        base.passages(QUESTION)
    assert base.add(documents, wait=False).vectors_waiting == 18
    assert base.prepare().embedded == 18
