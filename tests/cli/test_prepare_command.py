"""prepare: chunks of a file, for requests to come."""

import json

import pytest
from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave.errors import InvalidRequest, PathNotFound
from kvweave.local import close_local_engines, local_engine
from kvweave.types import Message

TEXTS = ["The password of Glorric is walnut.", "The ferry leaves at nine.", "The club meets on Monday."]


@pytest.fixture
def invoke(tmp_path):
    runner = CliRunner(env={"KVWEAVE_HOME": str(tmp_path / "home")})
    yield lambda *words: runner.invoke(app, [str(word) for word in words])
    close_local_engines()


def test_requests_of_the_same_home_reuse_the_chunks_of_a_file(invoke, tmp_path):
    lines = [json.dumps({"text": TEXTS[0]}), json.dumps({"page_content": TEXTS[1]}), "", json.dumps(TEXTS[2])]
    (tmp_path / "chunks.jsonl").write_text("\n".join(lines))
    done = json.loads(invoke("prepare", tmp_path / "chunks.jsonl", "--json").output)
    assert (done["chunks"], done["computed"]) == (3, 3)
    again = invoke("prepare", tmp_path / "chunks.jsonl", "--quiet")
    assert "3 chunks" in again.output
    assert "0 of them now" in again.output
    close_local_engines()
    engine = local_engine(home=tmp_path / "home")
    documents = [(str(number), text) for number, text in enumerate(TEXTS[::-1])]
    *_, finished = engine.complete([Message("user", "When does the ferry leave?")], documents, decoding={})
    origins = [span.origin for span in finished.answer.plan.spans if span.kind == "chunk"]
    assert set(origins) <= {"reused", "exact"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no chunks"),
        ('{"text": "a"}\n{"title": "b"}', "line 2 has no chunk"),
        ('{"text": "a"}\nnot JSON', "line 2 has no chunk"),
        ('{"text": " "}', "line 1 has no chunk"),
    ],
)
def test_a_file_without_chunks_is_refused_with_its_line(invoke, tmp_path, content, message):
    (tmp_path / "chunks.jsonl").write_text(content)
    refused = invoke("prepare", tmp_path / "chunks.jsonl").exception
    assert isinstance(refused, InvalidRequest)
    assert message in str(refused)


def test_a_file_in_another_encoding_is_refused(invoke, tmp_path):
    (tmp_path / "chunks.jsonl").write_bytes('{"text": "Zoé"}'.encode("latin-1"))
    refused = invoke("prepare", tmp_path / "chunks.jsonl").exception
    assert isinstance(refused, InvalidRequest)
    assert "is no text in UTF-8" in str(refused)


def test_a_missing_file_and_a_recipe_that_prepares_nothing_are_refused(invoke, tmp_path):
    assert isinstance(invoke("prepare", tmp_path / "none.jsonl").exception, PathNotFound)
    (tmp_path / "chunks.jsonl").write_text('{"text": "a"}')
    refused = invoke("prepare", tmp_path / "chunks.jsonl", "--recipe", "prefix").exception
    assert isinstance(refused, InvalidRequest)
    assert "recipe prefix prepares nothing" in str(refused)
