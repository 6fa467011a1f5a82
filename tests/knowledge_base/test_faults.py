"""Interrupts, damage, lost files, bad input: nothing is lost or stale, and there is one clear error."""

import builtins
import os
import shutil
import sys

import pytest

import kvweave
from kvweave.documents import indexing, readers
from kvweave.errors import (
    EmptyKnowledgeBase,
    InvalidRequest,
    KnowledgeBaseError,
    PathNotFound,
    StoreBusy,
    StoreError,
)

RECIPE = "reuse"

GLORRIC = "What is the password of Glorric?"


def test_an_interrupted_add_keeps_finished_work_and_resumes(open_kb, documents):
    base = open_kb()

    class Stop(Exception):
        pass

    def stop_halfway(stage, done, total):
        if stage == "computing KV" and done > total / 2:
            raise Stop

    with pytest.raises(Stop):
        base.add(documents, progress=stop_halfway)
    done = base.store.stats().entries
    assert done > 0
    assert base.missing_kv() > 0
    assert base.ask(GLORRIC).text == "walnut"  # chunks without KV are computed
    report = base.add(documents)
    assert len(report.unchanged) == 3
    assert 0 < report.chunk_kv_computed <= sum(d.chunks for d in base.documents())
    assert base.missing_kv() == 0


def test_after_a_restart_the_context_is_not_computed_again(open_kb, documents):
    first = open_kb()
    first.add(documents)
    expected = first.ask(GLORRIC)
    first.close()
    again = open_kb().ask(GLORRIC)
    assert again.text == expected.text
    assert again.plan == expected.plan


def test_a_damaged_file_is_recomputed_and_never_used(open_kb, documents):
    base = open_kb()
    base.add(documents)
    expected = base.ask(GLORRIC)
    base.close()
    for file in (base.folder / "kv").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
    base = open_kb()
    answer = base.ask(GLORRIC)
    assert answer.text == expected.text
    assert answer.plan.reused_share == 0
    assert base.store.stats().damaged > 0


def test_bad_input_is_named(open_kb, documents, tmp_path):
    base = open_kb()
    with pytest.raises(PathNotFound, match="nowhere"):
        base.add(documents, tmp_path / "nowhere")
    assert base.documents() == []
    with pytest.raises(EmptyKnowledgeBase):
        base.ask(GLORRIC)
    base.add(documents)
    with pytest.raises(InvalidRequest, match="empty"):
        base.ask("  ")
    with pytest.raises(InvalidRequest, match="top_k"):
        base.ask(GLORRIC, top_k=0)
    with pytest.raises(PathNotFound, match="nowhere"):
        base.remove(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="unknown setting 'topk'"):
        kvweave.open("x", home=tmp_path, topk=3)


def test_a_file_that_became_unreadable_is_removed_from_answers(open_kb, documents):
    base = open_kb()
    base.add(documents)
    (documents / "passwords.md").write_bytes(bytes(range(256)) * 40)
    report = base.add(documents)
    assert report.removed == (str(documents / "passwords.md"),)
    assert len(report.skipped) == 1
    assert base.ask(GLORRIC).text != "walnut"


def test_lost_kv_is_computed_by_the_next_add(open_kb, documents):
    base = open_kb()
    first = base.add(documents).chunk_kv_computed
    base.store.clear()
    assert base.add(documents).chunk_kv_computed == first
    assert all(span.origin != "fresh" for span in base.ask(GLORRIC).plan.spans if span.kind == "chunk")


def test_kv_computed_while_its_document_is_removed_is_not_stored(open_kb, documents):
    base = open_kb()
    base.add(documents / "passwords.md")
    stream = base.stream(GLORRIC, recipe="prefix")
    pieces = iter(stream)
    first = next(pieces)
    base.remove(documents / "passwords.md")
    assert first + "".join(pieces) == "walnut"
    assert set(base.store.stats().by_kind) <= {"bare"}


def test_a_failing_store_does_not_fail_the_answer(open_kb, documents, monkeypatch, caplog):
    base = open_kb()
    base.add(documents)

    def fail(*args, **kwargs):
        raise StoreBusy("locked")

    monkeypatch.setattr(base.store, "put", fail)
    assert base.ask(GLORRIC, recipe="prefix").text == "walnut"
    assert "not stored: locked" in caplog.text


def test_a_lost_index_is_reported_and_rebuilt(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.close()
    shutil.rmtree(base.folder / "vectors")
    again = open_kb()
    with pytest.raises(KnowledgeBaseError, match="kvweave add"):
        again.ask(GLORRIC)
    assert len(again.lost_documents()) == 3
    assert len(again.add(documents).changed) == 3
    assert again.ask(GLORRIC).text == "walnut"
    assert again.lost_documents() == []


def test_a_pdf_without_its_extra_is_skipped_and_named(open_kb, documents, tmp_path, monkeypatch):
    (documents / "report.pdf").write_bytes(b"%PDF-1.4 whatever")
    (tmp_path / "pypdf.py").write_text("raise ImportError\n")  # found first by the process that reads it
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    report = open_kb().add(documents)
    assert len(report.added) == 3
    assert "kvweave[pdf]" in report.skipped[0].reason


def test_a_file_that_cannot_be_opened_stays_indexed(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    open_file = builtins.open

    def failing(path, *args, **kwargs):
        if str(path).endswith("passwords.md"):
            raise OSError(5, "Input/output error", str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(readers, "open", failing, raising=False)
    report = base.add(documents)
    assert [skipped.path.name for skipped in report.skipped] == ["passwords.md"]
    assert report.removed == ()
    monkeypatch.undo()
    assert base.ask(GLORRIC).text == "walnut"


def test_a_closed_knowledge_base_raises(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.close()
    base.close()
    with pytest.raises(StoreError, match="was closed"):
        base.ask(GLORRIC)


def test_documents_in_an_inaccessible_folder_stay(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    look = os.stat

    def refusing(path, *args, **kwargs):
        if str(path).endswith("passwords.md"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setattr(indexing.os, "stat", refusing)
    assert not indexing.is_gone(str(documents / "passwords.md"))
    monkeypatch.undo()
    assert indexing.is_gone(str(documents / "nothing.md"))
    assert indexing.is_gone(str(documents))


def test_a_damaged_text_is_not_used_and_the_next_add_restores_it(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.close()
    altered = 0
    for path in (base.folder / "vectors").rglob("data/*.lance"):
        content = path.read_bytes()
        path.write_bytes(content.replace(b"walnut", b"wallet"))
        altered += b"walnut" in content
    assert altered
    again = open_kb()
    with pytest.raises(
        KnowledgeBaseError, match=r"another text of .*passwords\.md .* is damaged; run `kvweave add`"
    ):
        again.ask(GLORRIC)
    assert again.lost_documents() == [str(documents / "passwords.md")]
    again.add(documents)
    assert again.ask(GLORRIC).text == "walnut"
