"""A cross-encoder orders the best chunks again: as plain transformers score them."""

import numpy as np
import pytest
import torch

import kvweave
from kvweave.embedding import Reranker
from kvweave.errors import ModelNotFound
from support import tiny_kb

WORDS = (
    "[PAD] [UNK] [CLS] [SEP] note part the river is in north where xxxxx yyyyy zzzzz 0 1 2 3 4 , . ?".split()
)
QUESTION = "Where is the river?"


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory):
    """A folder with a tiny cross-encoder of random weights."""
    return save(tmp_path_factory.mktemp("cross"), labels=1)


def save(folder, labels):
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    (folder / "vocab.txt").write_text("\n".join(WORDS))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        num_labels=labels, initializer_range=0.5,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer = BertTokenizerFast(vocab={word: number for number, word in enumerate(WORDS)})
    tokenizer.save_pretrained(folder)
    return folder


def plain_scores(folder, question, texts):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForSequenceClassification.from_pretrained(folder),
    )
    with torch.inference_mode():
        inputs = [tokenizer([question], [text], return_tensors="pt", truncation=True) for text in texts]
        return [float(torch.sigmoid(model.eval()(**each).logits)) for each in inputs]


def test_scores_are_those_of_plain_transformers(cross_encoder):
    texts = ["The river is in the north.", "Note 3, part 2.", "zzzzz " * 30, ""]
    found = Reranker(str(cross_encoder)).scores(QUESTION, texts)
    np.testing.assert_allclose(found, plain_scores(cross_encoder, QUESTION, texts), atol=1e-5)
    assert Reranker(str(cross_encoder)).scores(QUESTION, []) == []


def test_the_setting_orders_the_passages_of_every_question(tmp_path, tiny, cross_encoder):
    (tmp_path / "note.txt").write_text(tiny_kb.text(0, parts=12))
    with tiny_kb.open_tiny(tmp_path / "home") as base:
        base.add(tmp_path / "note.txt")
        before = [each.text for each in base.passages(QUESTION, 40)]
    with tiny_kb.open_tiny(tmp_path / "home", reranker=str(cross_encoder)) as base:
        found = base.explained_passages(QUESTION, 12)
        best, sources = found[:3], base.ask(QUESTION).sources
    scores = dict(zip(before, plain_scores(cross_encoder, QUESTION, before), strict=True))
    best_scores = sorted(scores.values(), reverse=True)[:12]  # several texts have the same words
    np.testing.assert_allclose([scores[each.source.text] for each in found], best_scores, atol=1e-5)
    assert [each.source.text for each in found] != before[:12]
    assert found[0].rerank_score == pytest.approx(scores[found[0].source.text], abs=1e-5)
    assert {each.text for each in sources} == {each.source.text for each in best}


@pytest.mark.parametrize("wrong", ["missing", "empty", "labels"])
def test_what_is_no_reranker_is_named(tmp_path, tiny, wrong):
    folder = tmp_path / wrong
    if wrong != "missing":
        folder.mkdir()
    if wrong == "labels":
        save(folder, labels=3)
    (tmp_path / "note.txt").write_text(tiny_kb.text(0))
    with tiny_kb.open_tiny(tmp_path / "home", reranker=str(folder)) as base:
        base.add(tmp_path / "note.txt")
        with pytest.raises(ModelNotFound, match="reranker"):
            base.ask(QUESTION)


def test_a_short_name_chooses_a_multilingual_embedding_model(monkeypatch):
    from kvweave.embedding import TextEncoder

    assert TextEncoder("multilingual").name == "paraphrase-multilingual-MiniLM-L12-v2"
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda place, **_: asked.append(place) or 1 / 0)
    with pytest.raises(ModelNotFound, match="paraphrase-multilingual-MiniLM-L12-v2"):
        TextEncoder("multilingual").load()
    assert set(asked) == {
        "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
    }  # on the disk, then on the hub


def test_the_short_name_is_recorded_as_the_model_it_stands_for(tmp_path, tiny):
    (tmp_path / "note.txt").write_text(tiny_kb.text(0))
    with tiny_kb.open_tiny(tmp_path / "home", embedding_model="multilingual") as base:
        base.add(tmp_path / "note.txt")
        recorded = base.metadata.get("embedding_source")
    assert recorded == "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
    assert kvweave.KnowledgeBase is not None
