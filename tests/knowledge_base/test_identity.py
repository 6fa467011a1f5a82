"""What a knowledge base records about its model and chunks, and what it refuses."""

import shutil

import pytest
import torch

import kvweave
from kvweave.documents.indexing import IndexRun
from kvweave.errors import EmptyKnowledgeBase, InvalidRequest, KnowledgeBaseMismatch
from kvweave.index.vector_index import VectorIndex
from kvweave.testing import tiny_model, tiny_tokenizer

RECIPE = "reuse"

GLORRIC = "What is the password of Glorric?"


def test_another_model_is_refused_by_name_and_nothing_is_used(open_kb, documents, tmp_path):
    open_kb().add(documents)
    tiny_model().save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    other = open_kb(model=str(tmp_path / "other"))
    with pytest.raises(KnowledgeBaseMismatch, match=r"'reference'.*other"):
        other.ask(GLORRIC)
    other.remove_all()
    assert other.add(documents).chunk_kv_computed > 0
    assert open_kb().adapter.fingerprint.name == str(tmp_path / "other")  # recorded


def test_changed_weights_under_the_same_path_are_noticed(open_kb, documents, tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    open_kb(model=str(folder)).add(documents)
    tiny_model(seed=1).save_pretrained(folder)
    with pytest.raises(KnowledgeBaseMismatch):
        open_kb().ask(GLORRIC)


def test_weights_changed_under_an_open_knowledge_base_are_noticed(open_kb, documents, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    base = open_kb(model=str(tmp_path / "model"))
    base.add(documents)
    base.ask(GLORRIC)
    with torch.no_grad():
        base.adapter.model.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(KnowledgeBaseMismatch, match="other weights"):
        base.ask(GLORRIC)


def test_another_system_prompt_is_refused(open_kb, documents):
    open_kb(system="Read the notes.").add(documents)
    with pytest.raises(KnowledgeBaseMismatch, match="--system"):
        open_kb(system="Answer the questions.").ask(GLORRIC)
    assert open_kb().ask(GLORRIC).plan.reused_share > 0.5  # the recorded one is used


def test_knowledge_bases_share_nothing(open_kb, documents):
    open_kb("one").add(documents)
    two = open_kb("two")
    with pytest.raises(EmptyKnowledgeBase, match="two"):
        two.ask(GLORRIC)
    assert two.add(documents).chunk_kv_computed > 0


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 200])
def test_names_that_could_leave_the_home_are_refused(name, tmp_path):
    with pytest.raises(InvalidRequest, match="name"):
        kvweave.open(name, home=tmp_path)


def test_dtype_and_path_of_the_model_are_recorded(open_kb, documents, tmp_path, monkeypatch):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    open_kb(model="model", dtype="bfloat16").add(documents)
    monkeypatch.chdir(documents)
    again = open_kb()
    assert again.adapter.geometry.dtype == torch.bfloat16
    with pytest.raises(KnowledgeBaseMismatch, match="other dtype"):
        open_kb(dtype="float32").ask(GLORRIC)


def test_bits_of_the_weights_are_recorded_and_others_refused(open_kb, documents):
    open_kb(weights="int8").add(documents)
    again = open_kb()
    assert again.adapter.fingerprint.weight_bits == "int8"
    assert again.ask(GLORRIC).plan.reused_share > 0.5
    for bits in ("full", "int4"):
        with pytest.raises(
            KnowledgeBaseMismatch, match=f"--weights int8.*--weights {bits}.*other weight bits"
        ):
            open_kb(weights=bits).ask(GLORRIC)
    assert open_kb().adapter.fingerprint.weight_bits == "int8"  # refusals recorded nothing


def test_a_knowledge_base_older_than_the_choice_has_full_weights(open_kb, documents):
    base = open_kb()
    base.add(documents)
    base.state.database.execute("DELETE FROM identity WHERE name = 'model_weight_bits'")
    base.close()
    with pytest.raises(KnowledgeBaseMismatch, match=r"--weights full.*--weights int8"):
        open_kb(weights="int8").ask(GLORRIC)
    with pytest.raises(KnowledgeBaseMismatch, match=r"--weights full.*--weights int8"):
        open_kb(weights="int8").add(documents)
    again = open_kb()
    assert again.adapter.fingerprint.weight_bits == "full"
    assert again.ask(GLORRIC).plan.reused_share > 0.5


def test_a_process_is_refused_once_another_has_filled_it_with_another_model(open_kb, documents):
    base = open_kb()
    base.add(documents)
    assert base.ask(GLORRIC).text
    other = open_kb(weights="int8")
    other.remove_all()
    other.add(documents)
    with pytest.raises(KnowledgeBaseMismatch, match=r"--weights int8.*--weights full"):
        base.ask(GLORRIC)
    with pytest.raises(KnowledgeBaseMismatch, match=r"--weights int8.*--weights full"):
        base.calibrate([f"{GLORRIC} {number}" for number in range(20)])
    assert other.ask(GLORRIC).plan.reused_share > 0.5


def test_another_chunk_length_is_refused(open_kb, documents):
    open_kb(chunk_tokens=48).add(documents)
    with pytest.raises(KnowledgeBaseMismatch, match="--chunk-tokens '48', not '64'"):
        open_kb(chunk_tokens=64).add(documents)
    assert open_kb(chunk_tokens=None).add(documents).chunks == 0


def test_loading_the_model_records_nothing(open_kb, documents, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    assert open_kb(model=str(tmp_path / "model")).adapter.fingerprint.name == str(tmp_path / "model")
    assert open_kb().adapter.fingerprint.name == "reference"


def test_an_add_that_indexes_nothing_records_nothing(open_kb, documents, tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "empty.txt").write_text("")
    open_kb(model=str(tmp_path / "model")).add(tmp_path / "empty.txt")
    assert open_kb(model="reference").add(documents).chunks > 0


def test_chunks_longer_than_the_context_are_refused_before_anything_is_recorded(open_kb, documents):
    with pytest.raises(InvalidRequest, match="has room for"):
        open_kb(chunk_tokens=5000).add(documents)
    assert open_kb(chunk_tokens=48).add(documents).chunks > 0


def test_the_second_of_two_different_fills_of_a_new_knowledge_base_is_refused(open_kb, documents):
    one, other = open_kb(chunk_tokens=48), open_kb(chunk_tokens=96)
    late = IndexRun(other._indexer, lambda *_: None, wait=True)  # started while nothing was recorded yet
    one.add(documents / "passwords.md")
    with pytest.raises(KnowledgeBaseMismatch, match="--chunk-tokens"):
        late.add([documents / "supper.md"])
    assert len(one.documents()) == 1


def test_another_embedding_model_may_fill_an_empty_knowledge_base(open_kb, documents, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    first = open_kb()
    first.add(tmp_path / "empty.txt")
    shutil.rmtree(first.folder / "vectors")
    VectorIndex(first.folder / "vectors", 7)  # as another embedding model would have left it
    assert open_kb().add(documents).chunks > 0
