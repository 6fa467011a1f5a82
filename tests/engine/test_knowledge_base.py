"""A knowledge base through its public face, on the shipped reference model."""

import builtins
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvweave
from kvweave.engine import indexing
from kvweave.errors import (
    EmptyKnowledgeBase,
    InvalidRequest,
    KnowledgeBaseError,
    KnowledgeBaseMismatch,
    PathNotFound,
    PromptTooLong,
    StoreBusy,
    StoreError,
)
from kvweave.knowledge import reading
from kvweave.knowledge.bank import ChunkBank
from kvweave.samples import DOCUMENTS, sample_questions
from kvweave.testing import tiny_model, tiny_tokenizer

RUTH = "What is the job of Ruth?"


def entries(base) -> int:
    return base.store.stats().entries


def test_the_sample_questions_are_answered_and_the_second_time_nothing_but_the_question_is_computed(open_kb):
    base = open_kb()
    report = base.add(DOCUMENTS)
    assert report.chunks == report.chunk_kv_computed > len(report.added) > 10
    right = reused = 0
    for question in sample_questions():
        answer = base.ask(question.text)
        assert answer.plan.fresh_tokens == answer.plan.spans[-1].tokens
        reused += answer.text == question.answer
        right += base.ask(question.text, recipe="full").text == question.answer
    assert right == len(sample_questions())
    assert reused >= 0.6 * right  # what needs no other chunk survives plain reuse


def test_answers_at_ratio_one_are_those_of_full_attention(open_kb):
    base = open_kb()
    base.add(DOCUMENTS)
    for question in sample_questions():
        assert base.ask(question.text, ratio=1.0).text == base.ask(question.text, recipe="full").text


def test_an_answer_says_where_it_came_from_and_where_the_time_went(open_kb, documents):
    base = open_kb()
    base.add(documents)
    stream = base.stream(RUTH)
    with pytest.raises(InvalidRequest, match="not finished"):
        _ = stream.answer
    assert "".join(stream).strip() == stream.answer.text == "carpenter"
    answer = stream.answer
    assert str(documents / "jobs.md") in {source.document for source in answer.sources}
    for source in answer.sources:
        text = documents.joinpath(source.document).read_text()
        assert text[source.start : source.end] == source.text
    timing = answer.timing
    parts = (
        timing.retrieve_s
        + timing.tokenize_s
        + timing.match_s
        + timing.place_s
        + timing.select_s
        + timing.recompute_s
    )
    assert 0 < parts <= timing.ttft_s <= timing.total_s
    assert timing.answer_tokens == 1


def test_chunks_of_one_document_stand_in_reading_order(open_kb):
    base = open_kb()
    base.add(DOCUMENTS)
    for question in sample_questions():
        places = [(source.document, source.start) for source in base.ask(question.text).sources]
        by_document = {document: [s for d, s in places if d == document] for document, _ in places}
        assert all(starts == sorted(starts) for starts in by_document.values())


def test_adding_again_does_only_what_changed(open_kb, documents):
    base = open_kb()
    assert len(base.add(documents).added) == 3
    again = base.add(documents)
    assert (len(again.unchanged), again.chunks, again.chunk_kv_computed) == (3, 0, 0)
    (documents / "jobs.md").write_text("The job of Ruth is nurse.")
    changed = base.add(documents)
    assert changed.changed == (str(documents / "jobs.md"),)
    assert changed.chunk_kv_computed == 1
    assert base.ask(RUTH).text == "nurse"


def test_a_changed_file_keeps_the_kv_of_its_unchanged_chunks(open_kb, documents):
    base = open_kb()
    base.add(documents)
    jobs = documents / "jobs.md"
    jobs.write_text(jobs.read_text() + "\n\nThe job of Karen is nurse. The sky was sunny that morning.")
    report = base.add(documents)
    assert report.chunks > report.chunk_kv_computed >= 1


def test_a_removed_document_takes_its_chunks_vectors_and_kv_along(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.ask(RUTH, recipe="prefix")  # nodes whose paths run through several documents
    before = entries(base)
    base.remove(documents / "jobs.md")
    assert len(base.documents()) == 2
    assert entries(base) < before
    assert base.ask(RUTH).text != "carpenter"
    assert str(documents / "jobs.md") not in {s.document for s in base.ask(RUTH).sources}
    assert base.store.verify().sound


def test_nothing_is_left_of_the_only_document(open_kb, documents):
    base = open_kb()
    base.add(documents / "jobs.md")
    base.ask(RUTH, recipe="prefix")
    base.remove(documents / "jobs.md")
    assert set(base.store.stats().by_kind) <= {"bare"}  # the system prefix belongs to no document
    with pytest.raises(EmptyKnowledgeBase):
        base.ask(RUTH)


def test_kv_that_two_documents_share_goes_with_the_last_one(open_kb, documents):
    base = open_kb()
    (documents / "copy.md").write_text((documents / "jobs.md").read_text())
    base.add(documents)
    before = entries(base)
    base.remove(documents / "copy.md")
    assert entries(base) == before
    base.remove(documents / "jobs.md")
    assert entries(base) < before


def test_a_file_that_vanished_from_a_folder_is_removed_when_the_folder_is_added_again(open_kb, documents):
    base = open_kb()
    base.add(documents)
    (documents / "jobs.md").unlink()
    assert base.add(documents).removed == (str(documents / "jobs.md"),)
    assert len(base.documents()) == 2


def test_an_interrupted_add_keeps_what_was_done_and_goes_on(open_kb, documents):
    base = open_kb()

    class Stop(Exception):
        pass

    def stop_half_way(stage, done, total):
        if stage == "computing KV" and done > total / 2:
            raise Stop

    with pytest.raises(Stop):
        base.add(documents, progress=stop_half_way)
    done = entries(base)
    assert done > 0
    assert base.missing_kv() > 0
    assert base.ask(RUTH).text == "carpenter"  # what has no KV yet is computed
    report = base.add(documents)
    assert len(report.unchanged) == 3
    assert 0 < report.chunk_kv_computed <= sum(d.chunks for d in base.documents())
    assert base.missing_kv() == 0


def test_an_answer_outlives_a_restart_without_computing_its_context_again(open_kb, documents):
    first = open_kb()
    first.add(documents)
    expected = first.ask(RUTH)
    first.close()
    again = open_kb().ask(RUTH)
    assert again.text == expected.text
    assert again.plan == expected.plan


def test_a_damaged_file_is_recomputed_and_never_used(open_kb, documents):
    base = open_kb()
    base.add(documents)
    expected = base.ask(RUTH)
    base.close()
    for file in (base.folder / "kv").rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
    base = open_kb()
    answer = base.ask(RUTH)
    assert answer.text == expected.text
    assert answer.plan.reused_share == 0
    assert base.store.stats().damaged > 0


def test_another_model_is_refused_by_name_and_nothing_is_used(open_kb, documents, tmp_path):
    open_kb().add(documents)
    tiny_model().save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    other = open_kb(model=str(tmp_path / "other"))
    with pytest.raises(KnowledgeBaseMismatch, match=r"'reference'.*other"):
        other.ask(RUTH)
    other.remove_all()
    assert other.add(documents).chunk_kv_computed > 0
    assert open_kb().adapter.fingerprint.name == str(tmp_path / "other")  # remembered


def test_changed_weights_under_the_same_path_are_noticed(open_kb, documents, tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    open_kb(model=str(folder)).add(documents)
    tiny_model(seed=1).save_pretrained(folder)
    with pytest.raises(KnowledgeBaseMismatch):
        open_kb().ask(RUTH)


def test_another_system_prompt_is_refused(open_kb, documents):
    open_kb(system="Read the notes.").add(documents)
    with pytest.raises(KnowledgeBaseMismatch, match="--system"):
        open_kb(system="Answer the questions.").ask(RUTH)
    assert open_kb().ask(RUTH).plan.reused_share > 0.5  # the settled one is used


def test_knowledge_bases_share_nothing(open_kb, documents):
    open_kb("one").add(documents)
    two = open_kb("two")
    with pytest.raises(EmptyKnowledgeBase, match="two"):
        two.ask(RUTH)
    assert two.add(documents).chunk_kv_computed > 0


def test_a_prompt_that_is_too_long_says_so_and_chunks_are_dropped_only_if_allowed(open_kb, documents):
    base = open_kb(max_new_tokens=1950)
    base.add(documents)
    with pytest.raises(PromptTooLong, match="more than the 2048"):
        base.ask(RUTH)
    answer = base.ask(RUTH, drop_chunks=True)
    assert 0 < len(answer.sources) < 4


def test_a_store_too_small_for_everything_keeps_its_limit_and_still_answers(open_kb, documents):
    base = open_kb(limit_bytes=900_000)
    report = base.add(documents)
    assert report.chunk_kv_left_out > 0
    assert base.store.stats().bytes <= 900_000
    assert base.ask(RUTH).text == "carpenter"
    assert base.store.stats().bytes <= 900_000


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 200])
def test_names_that_could_leave_the_home_are_refused(name, tmp_path):
    with pytest.raises(InvalidRequest, match="name"):
        kvweave.open(name, home=tmp_path)


def test_bad_input_is_named(open_kb, documents, tmp_path):
    base = open_kb()
    with pytest.raises(PathNotFound, match="nowhere"):
        base.add(documents, tmp_path / "nowhere")
    assert base.documents() == []
    with pytest.raises(EmptyKnowledgeBase):
        base.ask(RUTH)
    base.add(documents)
    with pytest.raises(InvalidRequest, match="empty"):
        base.ask("  ")
    with pytest.raises(InvalidRequest, match="top_k"):
        base.ask(RUTH, top_k=0)
    with pytest.raises(PathNotFound, match="nowhere"):
        base.remove(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="unknown setting 'topk'"):
        kvweave.open("x", home=tmp_path, topk=3)


def test_tokenization_of_chunks_and_prompts_agrees(open_kb, documents):
    """The ids a chunk's KV was made from are the ids it has in a prompt; else nothing would ever be found."""
    (documents / "odd.txt").write_text("Ruth <eos> <bos> [unk] \u00e9\u4e16 \U0001f600 <pad>\n\n\n lamp")
    base = open_kb()
    base.add(documents)
    plan = base.ask("lamp <eos>", top_k=50).plan
    assert [span.origin for span in plan.spans if span.kind == "chunk"].count("fresh") == 0


def test_sampling_is_reproducible_with_a_seed(open_kb, documents):
    base = open_kb(temperature=5.0, seed=3, max_new_tokens=8)
    base.add(documents)
    torch.manual_seed(0)
    assert base.ask(RUTH).text == base.ask(RUTH).text != "carpenter"


def test_a_file_that_turned_unreadable_is_no_longer_answered_from(open_kb, documents):
    base = open_kb()
    base.add(documents)
    (documents / "jobs.md").write_bytes(bytes(range(256)) * 40)
    report = base.add(documents)
    assert report.removed == (str(documents / "jobs.md"),)
    assert len(report.skipped) == 1
    assert base.ask(RUTH).text != "carpenter"


def test_kv_that_was_lost_is_computed_by_the_next_add(open_kb, documents):
    base = open_kb()
    first = base.add(documents).chunk_kv_computed
    base.store.clear()
    assert base.add(documents).chunk_kv_computed == first
    assert base.ask(RUTH).plan.reused_share > 0.9


def test_another_recipe_gets_its_own_preparation(open_kb, documents):
    base = open_kb()
    base.add(documents)
    bare = open_kb(recipe="direct")
    assert bare.add(documents).chunk_kv_computed > 0
    assert bare.ask(RUTH).plan.reused_tokens > 0


def test_a_raised_limit_is_caught_up_with(open_kb, documents):
    base = open_kb(limit_bytes=900_000)
    left_out = base.add(documents).chunk_kv_left_out
    base.store.set_limit(10**8)
    report = base.add(documents)
    assert (report.chunk_kv_computed, report.chunk_kv_left_out) == (left_out, 0)


def test_in_a_full_store_new_documents_take_the_room_of_what_was_never_asked_for(open_kb, documents):
    base = open_kb(limit_bytes=900_000)
    base.add(documents)
    before = base.missing_kv()
    (documents / "new.txt").write_text("The job of Karen is nurse. The sky was sunny that morning.")
    report = base.add(documents)
    assert report.chunk_kv_computed == 1
    assert base.missing_kv() == before + 1  # one older entry had to go
    assert base.ask("What is the job of Karen?", top_k=1).plan.reused_share > 0.5
    assert base.store.stats().bytes <= 900_000


def test_what_was_asked_for_is_not_pushed_out_by_new_documents(open_kb, documents):
    base = open_kb(limit_bytes=900_000)
    base.add(documents)
    base._database.execute("UPDATE entries SET uses = 1")  # as if each had been found once
    (documents / "new.txt").write_text("The job of Karen is nurse. The sky was sunny that morning. " * 8)
    report = base.add(documents)
    assert report.chunk_kv_left_out > 0
    assert base.store.stats().evicted == 0


def test_kv_computed_while_its_document_is_removed_is_not_kept(open_kb, documents):
    base = open_kb()
    base.add(documents / "jobs.md")
    stream = base.stream(RUTH, recipe="prefix")
    pieces = iter(stream)
    first = next(pieces)
    base.remove(documents / "jobs.md")
    assert first + "".join(pieces) == "carpenter"
    assert set(base.store.stats().by_kind) <= {"bare"}


def test_a_store_that_fails_does_not_take_the_answer_back(open_kb, documents, monkeypatch, caplog):
    base = open_kb()
    base.add(documents)

    def fail(*args, **kwargs):
        raise StoreBusy("locked")

    monkeypatch.setattr(base.store, "put", fail)
    assert base.ask(RUTH, recipe="prefix").text == "carpenter"
    assert "not kept: locked" in caplog.text


def test_a_lost_index_is_told_and_mended(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.close()
    shutil.rmtree(base.folder / "vectors")
    again = open_kb()
    with pytest.raises(KnowledgeBaseError, match="kvweave add"):
        again.ask(RUTH)
    assert len(again.lost_documents()) == 3
    assert len(again.add(documents).changed) == 3
    assert again.ask(RUTH).text == "carpenter"
    assert again.lost_documents() == []


def test_dtype_and_place_of_the_model_are_remembered(open_kb, documents, tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    open_kb(model="model", dtype="bfloat16").add(documents)
    monkeypatch.chdir(documents)
    again = open_kb()
    assert again.adapter.geometry.dtype == torch.bfloat16
    with pytest.raises(KnowledgeBaseMismatch, match="other dtype"):
        open_kb(dtype="float32").ask(RUTH)


def test_another_way_of_cutting_is_refused(open_kb, documents):
    open_kb(chunk_tokens=48).add(documents)
    with pytest.raises(KnowledgeBaseMismatch, match="--chunk-tokens '48', not '64'"):
        open_kb(chunk_tokens=64).add(documents)
    assert open_kb(chunk_tokens=None).add(documents).chunks == 0


def test_looking_settles_nothing(open_kb, documents, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    assert open_kb(model=str(tmp_path / "model")).adapter.fingerprint.name == str(tmp_path / "model")
    assert open_kb().adapter.fingerprint.name == "reference"


def test_iterating_twice_keeps_the_answer(open_kb, documents):
    base = open_kb()
    base.add(documents)
    stream = base.stream(RUTH)
    assert "".join(stream) == "carpenter"
    assert "".join(stream) == ""
    assert stream.answer.text == "carpenter"


def test_threads_may_ask_one_knowledge_base_at_once(open_kb):
    base = open_kb()
    base.add(DOCUMENTS)
    questions = [q for q in sample_questions() if q.kind in ("single", "multikey")] * 3
    expected = [base.ask(q.text).text for q in questions]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda q: base.ask(q.text).text, questions)) == expected


def test_a_pdf_without_its_extra_is_skipped_and_named(open_kb, documents, monkeypatch):
    (documents / "report.pdf").write_bytes(b"%PDF-1.4 whatever")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    report = open_kb().add(documents)
    assert len(report.added) == 3
    assert "kvweave[pdf]" in report.skipped[0].reason


def test_a_file_that_cannot_be_opened_now_keeps_what_is_indexed_of_it(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    open_file = builtins.open

    def failing(path, *args, **kwargs):
        if str(path).endswith("jobs.md"):
            raise OSError(5, "Input/output error", str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(reading, "open", failing, raising=False)
    report = base.add(documents)
    assert [skipped.path.name for skipped in report.skipped] == ["jobs.md"]
    assert report.removed == ()
    monkeypatch.undo()
    assert base.ask(RUTH).text == "carpenter"


def test_a_document_replaced_by_a_folder_or_reached_by_a_new_link_leaves_no_stale_text(open_kb, documents):
    base = open_kb()
    base.add(documents)
    jobs = documents / "jobs.md"
    jobs.unlink()
    jobs.mkdir()
    assert base.add(documents).removed == (str(jobs),)
    (documents / "a").symlink_to(documents / "dinner.md")
    (documents / "dinner.md").write_text("The next guest was Peter. He ordered the cake.")
    base.add(documents)
    assert "soup" not in "".join(s.text for s in base.ask("What was ordered by Peter?").sources)


def test_the_home_is_not_indexed_into_itself(open_kb, documents, tmp_path):
    base = kvweave.open("notes", home=documents / "kept", chunk_tokens=48)
    with base:
        base.add(documents)
        report = base.add(documents)
        assert len(base.documents()) == 3
        assert report.skipped == ()


def test_an_add_that_indexes_nothing_settles_nothing(open_kb, documents, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "empty.txt").write_text("")
    open_kb(model=str(tmp_path / "model")).add(tmp_path / "empty.txt")
    assert open_kb(model="reference").add(documents).chunks > 0


def test_a_closed_knowledge_base_says_so(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.close()
    base.close()
    with pytest.raises(StoreError, match="was closed"):
        base.ask(RUTH)


def test_chunks_longer_than_the_context_are_refused_before_anything_is_settled(open_kb, documents):
    with pytest.raises(InvalidRequest, match="has room for"):
        open_kb(chunk_tokens=5000).add(documents)
    assert open_kb(chunk_tokens=48).add(documents).chunks > 0


def test_of_two_that_fill_a_new_knowledge_base_differently_the_second_is_told(open_kb, documents):
    one, other = open_kb(chunk_tokens=48), open_kb(chunk_tokens=96)
    late = other._indexer()  # made while nothing was settled yet
    one.add(documents / "jobs.md")
    with pytest.raises(KnowledgeBaseMismatch, match="--chunk-tokens"):
        late.add([documents / "dinner.md"], lambda *_: None, settle=lambda: other._settle(late))
    assert len(one.documents()) == 1


def test_another_embedding_model_may_fill_what_is_still_empty(open_kb, documents, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    first = open_kb()
    first.add(tmp_path / "empty.txt")
    shutil.rmtree(first.folder / "vectors")
    ChunkBank(first.folder / "vectors", 7)  # as another embedding model would have left it
    assert open_kb().add(documents).chunks > 0


def test_a_folder_replaced_by_a_file_leaves_nothing_behind(open_kb, documents):
    base = open_kb()
    base.add(documents)
    shutil.rmtree(documents)
    documents.write_text("The job of Karen is nurse.")
    report = base.add(documents)
    assert len(report.removed) == 3
    assert [d.source for d in base.documents()] == [str(documents)]


def test_documents_in_a_folder_that_cannot_be_looked_into_now_stay(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    look = os.stat

    def refusing(path, *args, **kwargs):
        if str(path).endswith("jobs.md"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setattr(indexing.os, "stat", refusing)
    assert not indexing._is_gone(str(documents / "jobs.md"))
    monkeypatch.undo()
    assert indexing._is_gone(str(documents / "nothing.md"))
    assert indexing._is_gone(str(documents))
