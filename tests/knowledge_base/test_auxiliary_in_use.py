"""A knowledge base whose recipe selects with an auxiliary model, and the prompts that this model is tuned on."""

import pytest

from kvweave.errors import EmptyKnowledgeBase, InvalidRequest
from kvweave.testing import tiny_model, tiny_tokenizer

GLORRIC = "What is the password of Glorric?"


def notes(base) -> list[str]:
    return sorted(kind for kind in base.store.stats().by_kind if kind.startswith("auxiliary-"))


def test_add_records_features_with_the_configured_auxiliary_model(open_kb, documents, tmp_path):
    tiny_model("llama", seed=7).save_pretrained(tmp_path / "auxiliary")
    tiny_tokenizer().save_pretrained(tmp_path / "auxiliary")
    plain = open_kb()
    plain.add(documents)
    assert notes(plain) == []
    plain.close()
    shipped = open_kb(recipe="cacheclip")
    shipped.add(documents)  # the KV is there already; only the features are computed
    assert shipped.missing_kv() == 0
    assert len(notes(shipped)) == 1
    shipped.close()
    other = open_kb(recipe="cacheclip", auxiliary=str(tmp_path / "auxiliary"))
    assert other.missing_kv() > 0
    other.add(documents)
    assert other.missing_kv() == 0
    assert len(notes(other)) == 2
    assert other.ask(GLORRIC, ratio=0.5).plan.recomputed_tokens > 0


def test_a_prompt_has_the_chunks_of_the_answer(open_kb, documents):
    base = open_kb(system="Answer briefly.")
    with pytest.raises(EmptyKnowledgeBase):
        base.prompt(GLORRIC)
    base.add(documents)
    prompt = base.prompt(GLORRIC, top_k=3)
    assert (prompt.question, prompt.system) == (GLORRIC, "Answer briefly.")
    assert prompt.chunks == tuple(source.text for source in base.ask(GLORRIC, top_k=3).sources)
    with pytest.raises(InvalidRequest, match="empty"):
        base.prompt(" ")
