"""Adding, changing and removing documents, and their chunk KV."""

import shutil
import subprocess
import sys

import pytest

import kvweave
from kvweave.errors import EmptyKnowledgeBase

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")

GLORRIC = "What is the password of Glorric?"


def test_adding_again_processes_only_changes(open_kb, documents):
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


def test_removing_a_document_deletes_its_chunks_vectors_and_kv(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.ask(GLORRIC, recipe="prefix")  # exact versions after chunks of several documents
    before = base.store.stats().entries
    base.remove(documents / "passwords.md")
    assert len(base.documents()) == 2
    assert base.store.stats().entries < before
    assert base.ask(GLORRIC).text != "walnut"
    assert str(documents / "passwords.md") not in {s.document for s in base.ask(GLORRIC).sources}
    assert base.store.verify().sound


def test_removing_the_only_document_leaves_nothing(open_kb, documents):
    base = open_kb()
    base.add(documents / "passwords.md")
    base.ask(GLORRIC, recipe="prefix")
    base.remove(documents / "passwords.md")
    assert set(base.store.stats().by_kind) <= {"bare"}  # the system prefix belongs to no document
    with pytest.raises(EmptyKnowledgeBase):
        base.ask(GLORRIC)


def test_kv_that_two_documents_share_is_deleted_with_the_last_one(open_kb, documents):
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


def test_a_store_that_is_too_small_keeps_its_limit_and_still_answers(open_kb, documents):
    base = open_kb(recipe="weave", limit_bytes=1_800_000)
    report = base.add(documents)
    assert report.chunk_kv_left_out > 0
    assert base.store.stats().bytes <= 1_800_000
    assert base.ask(GLORRIC).text == "walnut"
    assert base.store.stats().bytes <= 1_800_000


def test_another_recipe_gets_its_own_preparation(open_kb, documents):
    base = open_kb()
    base.add(documents)
    bare = open_kb(recipe="bare+reuse")
    assert bare.add(documents).chunk_kv_computed > 0
    assert bare.ask(GLORRIC).plan.reused_tokens > 0


def test_after_a_raised_limit_add_prepares_the_rest(open_kb, documents):
    base = open_kb(recipe="reuse", limit_bytes=1_800_000)
    left_out = base.add(documents).chunk_kv_left_out
    base.store.set_limit(10**8)
    report = base.add(documents)
    assert (report.chunk_kv_computed, report.chunk_kv_left_out) == (left_out, 0)


def test_in_a_full_store_new_documents_evict_unused_entries(open_kb, documents):
    base = open_kb(recipe="reuse", limit_bytes=1_800_000)
    base.add(documents)
    base.store.set_limit(base.store.stats().bytes)
    before = base.missing_kv()
    (documents / "new.txt").write_text(
        "The password of Plabry is needle. The sky was sunny that morning. " * 4
    )
    report = base.add(documents)
    assert report.chunk_kv_computed == 1
    assert base.missing_kv() > before  # older entries were evicted
    assert base.ask("What is the password of Plabry?", top_k=1).plan.reused_share > 0.5
    assert base.store.stats().bytes <= 1_800_000


def test_used_entries_are_not_evicted_by_new_documents(open_kb, documents):
    base = open_kb(recipe="reuse", storage="exact", limit_bytes=1_800_000)
    base.add(documents)
    base.state.database.execute("UPDATE entries SET uses = 1")  # as if each had been found once
    (documents / "new.txt").write_text(
        "The password of Plabry is needle. The sky was sunny that morning. " * 8
    )
    report = base.add(documents)
    assert report.chunk_kv_left_out > 0
    assert base.store.stats().evicted == 0


def test_replacing_a_document_by_a_folder_or_linking_to_it_leaves_no_stale_text(open_kb, documents):
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


def test_the_home_folder_is_not_indexed(open_kb, documents, tmp_path):
    base = kvweave.open("notes", home=documents / "kept", chunk_tokens=48)
    with base:
        base.add(documents)
        report = base.add(documents)
        assert len(base.documents()) == 3
        assert report.skipped == ()


def test_replacing_a_folder_by_a_file_removes_its_documents(open_kb, documents):
    base = open_kb()
    base.add(documents)
    shutil.rmtree(documents)
    documents.write_text("The password of Plabry is needle.")
    report = base.add(documents)
    assert len(report.removed) == 3
    assert [d.source for d in base.documents()] == [str(documents)]


def test_listing_and_removing_unknown_documents_import_no_model_code(open_kb, documents):
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
