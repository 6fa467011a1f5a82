"""Chunks that are prepared after `add` has returned: in which order, beside whom, and what an interruption leaves."""

import errno
import threading
import time
from dataclasses import replace

import pytest

from kvweave.background import runner
from kvweave.database import Database
from kvweave.documents import chunk_preparation, indexing
from kvweave.documents.chunk_preparation import ChunkPreparer
from kvweave.errors import StoreFull, StoreReadOnly
from kvweave.kvstore.tiers.disk import EntryFiles
from kvweave.recipes.offline import PreparationStep
from kvweave.state.active_requests import RequestGuard
from support import tiny_kb
from support.killed_processes import victims

QUESTION = "what about the river"


def open_tiny(home, **settings):
    """Each part of a text is one chunk."""
    return tiny_kb.open_tiny(home, chunk_tokens=60, **settings)


@pytest.fixture
def documents(tmp_path):
    """Six documents of three chunks each."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(tiny_kb.text(number))
    return folder


@pytest.fixture
def base(tiny, tmp_path):
    with open_tiny(tmp_path / "home") as found:
        yield found


class Stop(Exception):
    pass


def stop_after(reports):
    """A progress callback that interrupts the work with its so many-th report."""
    left = [reports]

    def report(stage, done, total):
        left[0] -= stage == "computing KV"
        if left[0] <= 0:
            raise Stop

    return report


def origins(answer):
    return {span.origin for span in answer.plan.spans if span.kind == "chunk"}


def test_documents_are_answered_from_before_their_chunks_are_prepared(base, documents):
    report = base.add(documents, wait=False)
    assert report.chunks == report.chunk_kv_waiting == 18
    assert report.chunk_kv_computed == 0
    status = base.preparation.status()
    assert (status.chunks, status.left, status.left_without_kv, status.process) == (18, 18, 18, None)
    assert status.most_left_s is None  # nothing was measured yet
    before = base.ask(QUESTION)
    assert origins(before) == {"fresh"}
    assert before.text == base.ask(QUESTION, recipe="full").text

    assert base.prepare().computed == 18
    assert base.missing_kv() == 0
    assert (base.preparation.status().left, base.preparation.status().most_left_s) == (0, 0)
    assert set(base.preparation.chunks_with_kv().values()) == {3}
    assert origins(base.ask(QUESTION, cache="off")) <= {"exact", "reused"}
    again = base.add(documents, wait=False)
    assert again.chunk_kv_waiting == 0
    (documents / "0.txt").write_text(tiny_kb.text(8))
    assert base.add(documents, wait=False).chunk_kv_waiting == 3
    assert base.preparation.status().most_left_s is None  # what an earlier run has measured is no estimate


@pytest.mark.parametrize(("earlier", "now"), [(1000.0, 10.0), (10.0, 1000.0)])
def test_the_time_that_is_left_is_estimated_from_what_this_run_has_taken(
    base, documents, monkeypatch, earlier, now
):
    clock, tokens_per_s, compute = [0.0], [earlier], PreparationStep.compute

    def timed(step, ctx, chunks):
        def progress(tokens):
            clock[0] += tokens / tokens_per_s[0]
            ctx.progress(tokens)

        return compute(step, replace(ctx, progress=progress), chunks)

    monkeypatch.setattr(PreparationStep, "compute", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(chunk_preparation, "BATCH_CHUNKS", 1)
    monkeypatch.setattr(chunk_preparation, "_RECORD_S", 0.0)
    base.add(documents, wait=False)
    for tokens_per_s[0] in (earlier, now):  # as on an idle machine, and beside other programs
        seen, stop = [], stop_after(7)

        def watch(*progress, seen=seen, stop=stop):
            seen.append(base.preparation.status())
            stop(*progress)

        with pytest.raises(Stop):
            base.prepare(watch)
    first, status = seen[0], seen[-1]
    assert first.most_left_s is None  # the first run's estimate is gone
    assert base.preparation.status().most_left_s is None  # no process works on it
    tokens = sum(chunk.kv_tokens for chunk in base.state.documents.all_chunks()) * status.left / 18
    assert tokens / now / 2 < status.least_left_s <= status.most_left_s < tokens / now * 2


def test_the_plainest_kv_of_every_chunk_comes_first_and_is_used_at_once(tiny, tmp_path, documents):
    with open_tiny(tmp_path / "home", recipe="weave", answer_limit_bytes=0) as base:
        base.add(documents, wait=False)
        kinds = []
        base.prepare(lambda *_: kinds.append(base.store.stats().by_kind))
        plain = [found["isolated-int8"].entries for found in kinds]
        dear = [found["woven-5-1-int8"].entries if "woven-5-1-int8" in found else 0 for found in kinds]
        assert 0 < plain[0] < 18  # entry by entry
        assert all(done == 18 for done, dearer in zip(plain, dear, strict=True) if dearer)
        assert plain[-1] == dear[-1] == 18
        assert sum(found.entries for found in kinds[-1].values()) == base.store.stats().entries
        assert base.missing_kv() == 0
        base.store.clear()
        base.add(documents, wait=False)
        with pytest.raises(Stop):
            base.prepare(stop_after(18))  # as soon as all plain KV is there
        assert set(base.preparation.chunks_with_kv().values()) == {3}
        assert base.missing_kv() == 18
        assert origins(base.ask(QUESTION)) <= {"reused", "exact"}


def test_chunks_that_were_retrieved_come_first(base, documents, monkeypatch):
    monkeypatch.setattr(chunk_preparation, "BATCH_CHUNKS", 1)
    base.add(documents, wait=False)
    for question in ("Note 3, part 2", "Note 4, part 1", "Note 4, part 1"):
        (source,) = base.ask(question, top_k=1, cache="off").sources
    assert source.document != str(documents / "0.txt")  # the first document would come first anyway
    with pytest.raises(Stop):
        base.prepare(stop_after(1))
    assert base.preparation.chunks_with_kv() == {source.document: 1}


def test_a_question_stops_the_work_until_it_is_answered(base, documents, tmp_path):
    base.add(documents, wait=False)
    with open_tiny(tmp_path / "home") as other:
        stream = other.stream(QUESTION, cache="off")
        work = threading.Thread(target=base.prepare)
        work.start()
        deadline = time.monotonic() + 60
        while other.preparation.worker() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert other.preparation.worker() is not None  # it works, and waits
        before = other.store.stats().entries
        pieces = iter(stream)
        next(pieces)
        (documents / "more.txt").write_text(tiny_kb.text(7))
        assert other.add(documents / "more.txt", wait=False).chunks == 3  # no lock is held
        assert other.store.stats().entries == before
        assert other.prepare(wait=False).computed == 0  # one at a time
        for _ in pieces:
            pass
        work.join(60)
        assert not work.is_alive()
        assert other.missing_kv() == 0  # what came meanwhile is prepared too


def test_requests_without_a_pause_delay_a_server_s_work_for_some_time_only(base, documents):
    base.add(documents, wait=False)
    with base.requests.start():
        guard = RequestGuard(base.requests, 0.0, threading.Event(), patience_s=0.2)
        began = time.monotonic()
        guard.yield_to_requests()
        assert time.monotonic() - began >= 0.2
        assert not guard.stop_requested()  # for a moment
        assert base.preparer.work(guard, lambda *_: None, wait=False).computed == 18
    assert base.missing_kv() == 0


def test_nothing_is_left_where_the_limit_has_no_room(base, documents):
    base.store.set_limit(0)
    report = base.add(documents, wait=False)
    assert report.chunk_kv_waiting == 0
    assert base.prepare().left_out == 18
    assert base.preparation.since_s == 0


def test_a_full_disk_leaves_the_mark_and_ends_the_work(base, documents, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no space left")

    base.add(documents, wait=False)
    with monkeypatch.context() as full:
        full.setattr(EntryFiles, "write", refuse)
        assert base.prepare().computed == 0
        assert base.preparation.status().left == 18
    with monkeypatch.context() as full:  # there is room for KV, and none in the database
        full.setattr(base.preparation, "unmark", lambda _: refuse_write())
        assert base.prepare().computed == 18
    assert base.preparation.since_s > 0
    assert base.prepare().computed == 0
    assert base.preparation.since_s == 0


def test_a_failure_of_the_model_only_pauses_a_server_s_work(base, documents, monkeypatch):
    base.add(documents, wait=False)
    stop, work = threading.Event(), ChunkPreparer.work
    failures = [RuntimeError("out of memory"), OSError("unreadable")]

    def failing(*given, **named):
        if failures:
            raise failures.pop()
        try:
            return work(*given, **named)
        finally:
            stop.set()

    monkeypatch.setattr(ChunkPreparer, "work", failing)
    monkeypatch.setattr(runner, "IDLE_POLL_S", 0.01)
    with open_tiny(base.config.home, idle_quiet_s=0.01) as prompt:
        prompt.watch_idle(stop)
    assert base.missing_kv() == 0


def refuse_write():
    raise StoreFull("no space left")


def test_each_recipe_has_a_mark_of_its_own(base, documents, tmp_path):
    base.add(documents, wait=False)
    with open_tiny(tmp_path / "home", recipe="reuse", storage="exact") as other:
        assert other.add(documents, wait=False).chunk_kv_waiting == 18
        with other.preparation.working():
            assert other.preparation.is_left_to_worker()
            assert not base.preparation.is_left_to_worker()
        assert other.prepare().computed == 18
        assert other.preparation.since_s == 0
    assert base.preparation.status().left == 18
    assert base.prepare().computed == 18
    assert base.preparation.status().left == 0


def test_a_read_only_home_is_refused_before_anything_is_computed(base, documents, monkeypatch):
    base.add(documents, wait=False)
    monkeypatch.setattr(Database, "read_only", True)
    assert not base.preparer.due
    with pytest.raises(StoreReadOnly):
        base.prepare()


def test_a_knowledge_base_that_was_emptied_meanwhile_ends_the_work(base, documents):
    base.add(documents, wait=False)
    base.remove_all()
    assert base.prepare().computed == 0
    assert base.preparation.status().left == 0


# Killed


def add_and_count(loaded, acknowledge, home, documents):
    """Add, and acknowledge each embedded text and each computed chunk."""
    indexing.BATCH_CHUNKS = BATCH
    chunk_preparation.embedded_chunks = lambda: BATCH
    with open_tiny(home) as base:
        counted(base, acknowledge)
        base.add(documents, wait=False)
        base.prepare()
        time.sleep(1000)


def counted(base, count):
    """Count the texts that are embedded and the chunks whose KV is computed, once each is done."""
    encoder, adapter = base.encoder, base.adapter
    encode, compute = encoder.encode, adapter.encode

    def encode_counted(texts):
        found = encode(texts)
        for _ in texts:
            count("embedded")
        return found

    def compute_counted(ids, *before):
        found = compute(ids, *before)
        if before:  # behind the system prefix: a chunk
            count("computed")
        return found

    encoder.encode = encode_counted
    adapter.encode = compute_counted


KILLS, CHUNKS, BATCH = 3, 72, 6


@pytest.mark.timeout(600)
def test_an_add_that_is_killed_again_and_again_does_its_work_about_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH_CHUNKS", BATCH)
    monkeypatch.setattr(chunk_preparation, "embedded_chunks", lambda: BATCH)
    home, documents = tmp_path / "home", tmp_path / "documents"
    documents.mkdir()
    for number in range(CHUNKS // 3):
        (documents / f"{number}.txt").write_text(tiny_kb.text(number))
    done = []
    with victims(tmp_path, tiny_kb.load, add_and_count, seed=40) as processes:
        for _ in range(KILLS):
            done += processes.killed_within(45, str(home), str(documents))
            with open_tiny(home) as base:
                if base.documents():
                    assert base.ask(QUESTION, cache="off").text
    with open_tiny(home) as base:
        adapter = base.adapter
        try:
            counted(base, done.append)
            base.add(documents, wait=False)
            base.prepare()
        finally:
            del adapter.encode
        assert base.missing_kv() == 0
        assert (
            base.components.index.without_vector([row.row_id for row in base.state.documents.all_chunks()])
            == {}
        )
        assert len(base.documents()) == CHUNKS // 3
        assert base.store.verify().sound
    assert CHUNKS <= done.count("embedded") <= CHUNKS + KILLS * (BATCH + 3)  # a batch that was not committed
    assert CHUNKS - KILLS <= done.count("computed") <= CHUNKS + KILLS  # not counted yet, or not stored yet


def test_kv_computed_after_a_removed_document_is_due_and_made_again(tiny, tmp_path, documents):
    with open_tiny(tmp_path / "home", recipe="weave", answer_limit_bytes=0) as base:
        base.add(documents)
        assert (base.missing_kv(), base.preparation.since_s) == (0, 0)
        base.remove(documents / "0.txt")
        assert base.missing_kv() > 0  # of chunks that were similar to its own
        assert base.preparation.since_s > 0
        base.prepare()
        assert (base.missing_kv(), base.preparation.since_s) == (0, 0)
        for name in ("0.txt", "1.txt"):
            (documents / name).unlink()
        assert len(base.add(documents, wait=False).removed) == 1
        assert base.preparation.since_s > 0
        base.prepare()
        assert (base.missing_kv(), base.preparation.since_s) == (0, 0)


def test_a_document_removed_while_chunks_are_prepared_stays_marked(tiny, tmp_path, documents):
    with open_tiny(tmp_path / "home", recipe="weave", answer_limit_bytes=0) as base:
        base.add(documents)
        changed_s = base.preparation.changed_s()  # as a process at work has seen the list
        base.remove(documents / "0.txt")
        assert not base.preparation.unmark(changed_s)
        assert base.preparation.since_s > 0
        base.remove(*(each.source for each in base.documents()))
        assert base.preparation.since_s == 0  # without documents there is nothing to prepare


def test_a_removal_and_its_mark_are_one_commit(tiny, tmp_path, documents, monkeypatch):
    with open_tiny(tmp_path / "home", recipe="weave", answer_limit_bytes=0) as base:
        base.add(documents)
        listed = len(base.documents())
        monkeypatch.setattr(type(base.preparation), "mark_removed", lambda self: refuse_write())
        with pytest.raises(StoreFull):
            base.remove(documents / "0.txt")
        assert len(base.documents()) == listed
