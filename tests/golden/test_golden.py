import base64
import json
import sqlite3
import tarfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvweave
from golden import pinned
from kvweave.kvstore.format import check_entry, open_entry, verify_content
from kvweave.types import ChunkKV

ARCHIVE = Path(__file__).parent / "knowledge_base.tar.xz"
PREPARED = Path(__file__).parent / "prepared_knowledge_base.tar.xz"


@pytest.mark.parametrize("name", pinned.PINNED)
def test_names_and_formats_are_as_pinned(name):
    assert json.loads(json.dumps(pinned.PINNED[name]())) == pinned.read(name)


@pytest.mark.parametrize("name", pinned.contents())
def test_an_entry_written_earlier_is_read(name, tmp_path):
    key, content = pinned.contents()[name]
    path = tmp_path / "entry.safetensors"
    path.write_bytes(base64.b64decode(pinned.read("entry_files")[name]))
    entry = open_entry(path)
    check_entry(entry, key.digest, content.token_ids, path)
    read = entry.content
    if isinstance(content, ChunkKV):
        assert torch.equal(read.kv, content.kv)
    else:
        assert all(torch.equal(read.tensors[each], tensor) for each, tensor in content.tensors.items())


def test_an_entry_with_queries_is_read_without_them(tmp_path):
    """Earlier versions could store the queries of the tokens too, under another key."""
    key, content = pinned.contents()["float32"]
    key = replace(key, provenance=replace(key.provenance, kind="isolated-qkv"))
    path = tmp_path / "entry.safetensors"
    path.write_bytes(base64.b64decode(pinned.read("entry_with_queries")))
    entry = open_entry(path)
    check_entry(entry, key.digest, content.token_ids, path)
    verify_content(entry.content)
    assert torch.equal(entry.content.kv, content.kv)


@pytest.fixture
def earlier(tmp_path):
    """A home folder of an earlier version: one document, its KV, answers, predicted questions, a conversation."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_knowledge_base_of_an_earlier_version_opens(earlier):
    """Its answers are of `weave`, which was the default recipe then."""
    with kvweave.open("default", home=earlier, recipe="weave") as base:
        assert [document.source for document in base.documents()] == ["/notes/passwords.md"]
        assert (
            base.missing_kv() == 2
        )  # `weave` prepares chunks otherwise since; the next test uses what there is
        assert base.store.verify().sound
        again = base.ask("What is the password of Glorric?")
        assert again.text == "walnut"
        assert again.plan.cache_hit is not None


@pytest.mark.parametrize(("top_k", "origin"), [(2, "exact"), (1, "reused")])
def test_chunk_kv_of_an_earlier_version_is_reused(earlier, top_k, origin):
    with kvweave.open("default", home=earlier) as base:
        answer = base.ask("What is the password of Glorric, please?", cache="off", top_k=top_k)
        assert answer.text == "walnut"
        chunks = [span for span in answer.plan.spans if span.kind == "chunk"]
        assert {span.origin for span in chunks} == {origin}
        assert origin == "exact" or "isolated-int8" in chunks[0].reason


def test_a_conversation_of_an_earlier_version_is_resumed(earlier):
    with kvweave.open("default", home=earlier) as base, base.conversation() as talk:
        before = len(talk.token_ids)
        assert before > 0
        text = "".join(base.send(talk, "What is the password of Glorric?"))
        assert "walnut" in text
        assert len(talk.token_ids) > before


def test_a_document_of_an_earlier_version_is_removed_with_everything_derived_from_it(earlier):
    with kvweave.open("default", home=earlier) as base:
        assert base.remove_all() == ["/notes/passwords.md"]
        assert base.documents() == []
        assert base.store.used_bytes == 0


@pytest.fixture
def prepared(tmp_path):
    """A home folder of 29 November 2026: two documents prepared for the default recipe, three answers, a conversation."""
    with tarfile.open(PREPARED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "home"


def test_a_prepared_knowledge_base_opens_with_nothing_to_compute_again(prepared):
    with kvweave.open("default", home=prepared) as base:
        assert [Path(document.source).name for document in base.documents()] == ["ferry.txt", "passwords.md"]
        assert base.missing_kv() == 0
        assert base.lost_documents() == []
        assert base.store.verify().sound


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ("What is the password of Glorric?", "walnut"),
        ("what is the password of fribble", "walnut"),
        ("When does the ferry leave?", "ferry"),
    ],
)
def test_its_answers_are_valid(prepared, question, text):
    """They were answered by `weave`, which was the default recipe then."""
    with kvweave.open("default", home=prepared, recipe="weave") as base:
        answer = base.ask(question)
        assert answer.text == text
        assert answer.plan.cache_hit is not None


def test_its_chunk_kv_is_reused(prepared):
    with kvweave.open("default", home=prepared) as base:
        answer = base.ask("What is the password of Glorric, please?", cache="off")
        assert answer.text == "walnut"
        assert answer.plan.reused_share > 0.7


def test_its_questions_in_other_words_do_no_harm(prepared):
    """Earlier versions let the model put questions in other words, and listed the questions that they had done."""
    (path,) = prepared.rglob("kb/*/catalog.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO paraphrased_questions VALUES ('What is the password of Glorric?')")
        database.execute("INSERT INTO prediction_worth VALUES ('paraphrase', 1, 1, 0, 2.5)")
        database.execute(
            "INSERT INTO predicted_questions VALUES ('Glorric has which password?', 'paraphrase', 1.0, NULL, 0, 0)"
        )
    with kvweave.open("default", home=prepared, recipe="weave") as base:
        assert base.predictions.predicted.totals().predicted["paraphrase"] == 1
        assert base.ask("What is the password of Glorric?").plan.cache_hit is not None
        assert not base.state.database.query(
            "SELECT 1 FROM sqlite_master WHERE name IN ('paraphrased_questions', 'prediction_worth')"
        )


def test_its_conversation_goes_on(prepared):
    with kvweave.open("default", home=prepared) as base, base.conversation() as talk:
        before = len(talk.token_ids)
        assert before > 0
        assert "walnut" in "".join(base.send(talk, "What is the password of Glorric?"))
        assert len(talk.token_ids) > before
