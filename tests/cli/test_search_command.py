"""search: passages, scores and why."""

import json

import pytest
from typer.testing import CliRunner

from kvweave.cli.app import app
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest

FIELDS = "source word_rank bm25 vector_rank cosine all_words quotes rerank_score lacks_vector words".split()


@pytest.fixture
def invoke(tmp_path):
    runner = CliRunner(
        env={
            "KVWEAVE_HOME": str(tmp_path / "home"),
            "KVWEAVE_CHUNK_TOKENS": "48",
            "KVWEAVE_RECIPE": "reuse",
            "COLUMNS": "200",
        }
    )
    return lambda *words: runner.invoke(app, [str(word) for word in words])


def test_it_says_why_each_passage_was_found(invoke, documents, monkeypatch):
    (documents / "vertrag.txt").write_text("双方同意：合同续签日期为每年三月一日。")
    assert invoke("add", documents).exit_code == 0
    monkeypatch.setattr("kvweave.models.loading.load_any_model", lambda *_, **__: 1 / 0)  # none is needed
    found = json.loads(invoke("search", "合同续签日期", "--json").output)
    assert found[0]["source"]["document"].endswith("vertrag.txt")
    assert all(list(each) == FIELDS for each in found)
    first = found[0]
    assert (first["word_rank"], first["all_words"], first["quotes"]) == (1, True, ["合同续签日期"])
    assert "续签" in first["words"]
    assert first["bm25"] > 0
    assert -1 <= first["cosine"] <= 1
    scores = [each["source"]["score"] for each in found]
    assert scores == sorted(scores, reverse=True)
    assert len(json.loads(invoke("search", "password", "--top-k", 2, "--json").output)) == 2
    printed = invoke("search", "What is the password of Glorric?", "--top-k", 2).output
    assert "1  " in printed
    assert "BM25" in printed
    assert "cosine" in printed
    assert "glorric" in printed
    assert "holds every word" in printed


def test_bad_input(invoke, documents):
    assert isinstance(invoke("search", "x").exception, EmptyKnowledgeBase)
    assert invoke("add", documents).exit_code == 0
    assert isinstance(invoke("search", " ").exception, InvalidRequest)
    assert isinstance(invoke("search", "x", "--top-k", 0).exception, InvalidRequest)
