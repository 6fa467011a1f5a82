"""Distillation of a tiny reference model into a tiny auxiliary one."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from training import auxiliary
from training.auxiliary import Distillation, learn_vocabulary, rate_factor
from training.distillation_model import transfer_attention
from training.plan import configuration

SEED, STEPS = 3, 8
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}


def tiny(tokenizer, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=2048, **SIZES))


@pytest.fixture(scope="module")
def auxiliary_vocabulary():
    """A small tokenizer like the auxiliary model's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.vocabulary.DOCUMENTS", 100)
        patch.setattr(auxiliary, "VOCABULARY", 700)
        return learn_vocabulary(0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, vocabulary) -> Path:
    """A model with uneven attention."""
    path = tmp_path_factory.mktemp("reference")
    model = tiny(vocabulary, 1)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 12
        layer.self_attn.k_proj.weight.data *= 12
    model.save_pretrained(path)
    vocabulary.save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def _small(uncompiled, auxiliary_vocabulary):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auxiliary, "learn_vocabulary", lambda seed: auxiliary_vocabulary)
        patch.setattr(auxiliary, "new_model", tiny)
        patch.setattr(auxiliary, "REFERENCE_SHAPE", (900, 300))
        patch.setattr(auxiliary, "AUXILIARY_SHAPE", (900, 300))
        patch.setattr(auxiliary, "DOCUMENTS", 2)
        patch.setattr(auxiliary, "QUESTIONS", 4)
        patch.setattr(auxiliary, "STEPS", STEPS)
        patch.setattr(auxiliary, "SAVE_STEPS", 2)
        patch.setattr(auxiliary, "WARM_STEPS", 2)
        patch.setattr(auxiliary, "RATE", 1e-2)
        yield


@pytest.fixture(scope="module")
def finished(reference, tmp_path_factory, _small) -> Distillation:
    """An uninterrupted run."""
    distillation = Distillation(reference, tmp_path_factory.mktemp("finished"), SEED)
    distillation.run()
    return distillation


def stop_at(monkeypatch, step: int) -> None:
    """Interrupt a run in this step."""
    original = Distillation.train_step

    def interrupted(self: Distillation) -> None:
        original(self)
        if self.step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Distillation, "train_step", interrupted)


class TestDistillation:
    def test_both_losses_fall_on_unseen_documents(self, reference, finished, tmp_path):
        unseen = finished.pairs(1000)
        with torch.no_grad():
            before = torch.stack(Distillation(reference, tmp_path, SEED).losses(unseen))
            after = torch.stack(finished.losses(unseen))
        assert (after < 0.9 * before).all()

    def test_a_resumed_run_equals_an_uninterrupted_one(self, reference, finished, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            stop_at(patch, 5)
            with pytest.raises(KeyboardInterrupt):
                Distillation(reference, tmp_path, SEED).run()
        resumed = Distillation(reference, tmp_path, SEED)
        assert resumed.step == 4
        resumed.run()
        one, other = (run.student.model.state_dict() for run in (finished, resumed))
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())
        assert (finished.running, finished.tokens) == (resumed.running, resumed.tokens)

    def test_another_seed_is_refused(self, reference, finished):
        with pytest.raises(SystemExit, match="holds a run with another seed; name another folder"):
            Distillation(reference, finished.folder, SEED + 1)

    def test_exports_weights_tokenizer_and_training_facts(self, finished, auxiliary_vocabulary):
        folder = finished.folder / "model"
        facts = json.loads((folder / "training.json").read_text())
        assert (facts["seed"], facts["steps"], facts["tokens"]) == (SEED, STEPS, finished.tokens)
        assert facts["reference"] == finished.teacher.adapter.fingerprint.digest
        model = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for name, weight in finished.student.model.state_dict().items():
            assert torch.equal(model[name], weight.bfloat16())
        assert AutoTokenizer.from_pretrained(folder)("Number 42.") == auxiliary_vocabulary("Number 42.")


def test_attention_is_transferred_to_tokens_of_the_same_characters(finished):
    source, target, characters = finished.pairs(0)[0]
    count = int(source.chunks.sum())
    attention = torch.zeros(2, len(source.chunks))
    attention[0, source.chunks] = 1 / count
    place = source.chunks.nonzero().flatten()[count // 2]
    attention[1, place] = 1.0
    result = transfer_attention(attention, source, target, characters)
    assert result.sum(-1) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert result[:, ~target.chunks].max() == 0
    start, end = source.offsets[count // 2]
    for index in result[1].nonzero().flatten() - target.chunks.nonzero()[0]:
        first, last = target.offsets[index]
        assert first < end
        assert last > start


def test_its_tokens_differ_from_the_references(auxiliary_vocabulary, vocabulary):
    assert len(auxiliary_vocabulary) == 700
    assert auxiliary_vocabulary.tokenize("the lantern") != auxiliary_vocabulary.tokenize(" the lantern")
    assert pieces(auxiliary_vocabulary, "in 12") == ["in", "Ġ12"]
    assert pieces(vocabulary, "in 12") == ["in", "Ġ1", "2"]
    text = "  Here is “naïve”\n\n🙂 "
    assert auxiliary_vocabulary.decode(auxiliary_vocabulary(text)["input_ids"]) == text


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """Return the pieces that merges do not cross."""
    return [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_the_rate_factor_warms_up_stays_and_decays(monkeypatch):
    monkeypatch.setattr(auxiliary, "STEPS", 1500)
    monkeypatch.setattr(auxiliary, "WARM_STEPS", 100)
    factors = [rate_factor(step) for step in range(1500)]
    assert factors[:100] == sorted(factors[:100])
    assert factors[0] == 0.01
    assert set(factors[99:501]) == {1.0}
    assert factors[500:] == sorted(factors[500:], reverse=True)
    assert factors[1000] == pytest.approx(0.5)
    assert factors[-1] == 0.02
