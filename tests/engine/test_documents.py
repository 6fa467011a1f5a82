"""Documents in, changed and out again, and the KV that goes with them."""

import shutil
import subprocess
import sys

import pytest

import kvweave
from kvweave.errors import EmptyKnowledgeBase

GLORRIC = "What is the password of Glorric?"


def test_adding_again_does_only_what_changed(open_kb, documents):
    base = open_kb(recipe="reuse")
    assert len(base.add(documents).added) == 3
    again = base.add(documents)
    assert (len(again.unchanged), again.chunks, again.chunk_kv_computed) == (3, 0, 0)
    (documents / "passwords.md").write_text("The password of Glorric is needle.")
    changed = base.add(documents)
    assert changed.changed == (str(documents / "passwords.md"),)
    assert changed.chunk_kv_computed == 1
    assert base.ask(GLORRIC).text == "needle"


def test_a_changed_file_keeps_the_kv_of_its_unchanged_chunks(open_kb, documents):
    base = open_kb(recipe="reuse")
    base.add(documents)
    words = documents / "passwords.md"
    words.write_text(
        words.read_text() + "\n\nThe password of Plabry is needle. The sky was sunny that morning."
    )
    report = base.add(documents)
    assert report.chunks > report.chunk_kv_computed >= 1


def test_a_removed_document_takes_its_chunks_vectors_and_kv_along(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.ask(GLORRIC, recipe="prefix")  # nodes whose paths run through several documents
    before = base.store.stats().entries
    base.remove(documents / "passwords.md")
    assert len(base.documents()) == 2
    assert base.store.stats().entries < before
    assert base.ask(GLORRIC).text != "walnut"
    assert str(documents / "passwords.md") not in {s.document for s in base.ask(GLORRIC).sources}
    assert base.store.verify().sound


def test_nothing_is_left_of_the_only_document(open_kb, documents):
    base = open_kb()
    base.add(documents / "passwords.md")
    base.ask(GLORRIC, recipe="prefix")
    base.remove(documents / "passwords.md")
    assert set(base.store.stats().by_kind) <= {"bare"}  # the system prefix belongs to no document
    with pytest.raises(EmptyKnowledgeBase):
        base.ask(GLORRIC)


def test_kv_that_two_documents_share_goes_with_the_last_one(open_kb, documents):
    base = open_kb()
    (documents / "copy.md").write_text((documents / "passwords.md").read_text())
    base.add(documents)
    before = base.store.stats().entries
    base.remove(documents / "copy.md")
    assert base.store.stats().entries == before
    base.remove(documents / "passwords.md")
    assert base.store.stats().entries < before


def test_a_file_that_vanished_from_a_folder_is_removed_when_the_folder_is_added_again(open_kb, documents):
    base = open_kb()
    base.add(documents)
    (documents / "passwords.md").unlink()
    assert base.add(documents).removed == (str(documents / "passwords.md"),)
    assert len(base.documents()) == 2


def test_a_store_too_small_for_everything_keeps_its_limit_and_still_answers(open_kb, documents):
    base = open_kb(limit_bytes=1_800_000)
    report = base.add(documents)
    assert report.chunk_kv_left_out > 0
    assert base.store.stats().bytes <= 1_800_000
    assert base.ask(GLORRIC).text == "walnut"
    assert base.store.stats().bytes <= 1_800_000


def test_another_recipe_gets_its_own_preparation(open_kb, documents):
    base = open_kb()
    base.add(documents)
    bare = open_kb(recipe="direct")
    assert bare.add(documents).chunk_kv_computed > 0
    assert bare.ask(GLORRIC).plan.reused_tokens > 0


def test_a_raised_limit_is_caught_up_with(open_kb, documents):
    base = open_kb(recipe="reuse", limit_bytes=1_800_000)
    left_out = base.add(documents).chunk_kv_left_out
    base.store.set_limit(10**8)
    report = base.add(documents)
    assert (report.chunk_kv_computed, report.chunk_kv_left_out) == (left_out, 0)


def test_in_a_full_store_new_documents_take_the_room_of_what_was_never_asked_for(open_kb, documents):
    base = open_kb(recipe="reuse", limit_bytes=1_800_000)
    base.add(documents)
    base.store.set_limit(base.store.stats().bytes)
    before = base.missing_kv()
    (documents / "new.txt").write_text(
        "The password of Plabry is needle. The sky was sunny that morning. " * 4
    )
    report = base.add(documents)
    assert report.chunk_kv_computed == 1
    assert base.missing_kv() > before  # older entries had to go
    assert base.ask("What is the password of Plabry?", top_k=1).plan.reused_share > 0.5
    assert base.store.stats().bytes <= 1_800_000


def test_what_was_asked_for_is_not_pushed_out_by_new_documents(open_kb, documents):
    base = open_kb(recipe="reuse", storage="exact", limit_bytes=1_800_000)
    base.add(documents)
    base._state.database.execute("UPDATE entries SET uses = 1")  # as if each had been found once
    (documents / "new.txt").write_text(
        "The password of Plabry is needle. The sky was sunny that morning. " * 8
    )
    report = base.add(documents)
    assert report.chunk_kv_left_out > 0
    assert base.store.stats().evicted == 0


def test_a_document_replaced_by_a_folder_or_reached_by_a_new_link_leaves_no_stale_text(open_kb, documents):
    base = open_kb()
    base.add(documents)
    words = documents / "passwords.md"
    words.unlink()
    words.mkdir()
    assert base.add(documents).removed == (str(words),)
    (documents / "a").symlink_to(documents / "supper.md")
    (documents / "supper.md").write_text("The next guest was Bertnis. She ordered the fig.")
    base.add(documents)
    assert "cheese" not in "".join(s.text for s in base.ask("What was ordered by Bertnis?").sources)


def test_the_home_is_not_indexed_into_itself(open_kb, documents, tmp_path):
    base = kvweave.open("notes", home=documents / "kept", chunk_tokens=48)
    with base:
        base.add(documents)
        report = base.add(documents)
        assert len(base.documents()) == 3
        assert report.skipped == ()


def test_a_folder_replaced_by_a_file_leaves_nothing_behind(open_kb, documents):
    base = open_kb()
    base.add(documents)
    shutil.rmtree(documents)
    documents.write_text("The password of Plabry is needle.")
    report = base.add(documents)
    assert len(report.removed) == 3
    assert [d.source for d in base.documents()] == [str(documents)]


def test_listing_and_removing_the_unindexed_bring_none_of_the_code_that_runs_models(open_kb, documents):
    base = open_kb()
    base.add(documents)
    script = """
import sys
import kvweave
from kvweave.errors import PathNotFound
with kvweave.open("notes", home=sys.argv[1]) as base:
    assert len(base.documents()) == 3
    try:
        base.remove("never-added.md")
    except PathNotFound:
        pass
assert not {"transformers", "sentence_transformers", "lancedb"} & sys.modules.keys()
"""
    command = [sys.executable, "-c", script, str(base.config.home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
