"""Distillation of a tiny reference model into a tiny auxiliary one."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from training import auxiliary
from training.auxiliary import Distillation, learn_vocabulary, pace
from training.plan import configuration
from training.sides import carried

SEED, STEPS = 3, 8
SIZES = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}


def tiny(tokenizer, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=2048, **SIZES))


@pytest.fixture(scope="module")
def others():
    """A vocabulary of the auxiliary model's kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.vocabulary.DOCUMENTS", 100)
        patch.setattr(auxiliary, "VOCABULARY", 700)
        return learn_vocabulary(0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory, vocabulary) -> Path:
    """A model that looks at some tokens more than at others."""
    path = tmp_path_factory.mktemp("reference")
    model = tiny(vocabulary, 1)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 12
        layer.self_attn.k_proj.weight.data *= 12
    model.save_pretrained(path)
    vocabulary.save_pretrained(path)
    return path


@pytest.fixture(scope="module", autouse=True)
def _small(uncompiled, others):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auxiliary, "learn_vocabulary", lambda seed: others)
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
    """A run that was never stopped."""
    distillation = Distillation(reference, tmp_path_factory.mktemp("finished"), SEED)
    distillation.run()
    return distillation


def stop_at(monkeypatch, step: int) -> None:
    """A power cut in the middle of a step."""
    training = Distillation._train

    def stopping(self: Distillation) -> None:
        training(self)
        if self.step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Distillation, "_train", stopping)


class TestARun:
    def test_both_losses_fall_on_documents_that_it_was_not_trained_on(self, reference, finished, tmp_path):
        unseen = finished.pairs(1000)
        with torch.no_grad():
            before = torch.stack(Distillation(reference, tmp_path, SEED).losses(unseen))
            after = torch.stack(finished.losses(unseen))
        assert (after < 0.9 * before).all()

    def test_resumed_it_equals_an_unbroken_one(self, reference, finished, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            stop_at(patch, 5)
            with pytest.raises(KeyboardInterrupt):
                Distillation(reference, tmp_path, SEED).run()
        resumed = Distillation(reference, tmp_path, SEED)
        assert resumed.step == 4
        resumed.run()
        one, other = (run.student.model.state_dict() for run in (finished, resumed))
        assert all(torch.equal(weight, other[name]) for name, weight in one.items())
        assert (finished.shown, finished.tokens) == (resumed.shown, resumed.tokens)

    def test_of_another_seed_is_refused(self, reference, finished):
        with pytest.raises(SystemExit, match="holds a run with another seed; name another folder"):
            Distillation(reference, finished.folder, SEED + 1)

    def test_exports_weights_tokenizer_and_how_they_were_made(self, finished, others):
        made = finished.folder / "model"
        facts = json.loads((made / "training.json").read_text())
        assert (facts["seed"], facts["steps"], facts["tokens"]) == (SEED, STEPS, finished.tokens)
        assert facts["reference"] == finished.teacher.adapter.fingerprint.digest
        model = AutoModelForCausalLM.from_pretrained(made).state_dict()
        for name, weight in finished.student.model.state_dict().items():
            assert torch.equal(model[name], weight.bfloat16())
        assert AutoTokenizer.from_pretrained(made)("Number 42.") == others("Number 42.")


def test_attention_is_carried_to_the_tokens_that_stand_for_the_same_characters(finished):
    theirs, ours, characters = finished.pairs(0)[0]
    count = int(theirs.chunks.sum())
    seen = torch.zeros(2, len(theirs.chunks))
    seen[0, theirs.chunks] = 1 / count
    place = theirs.chunks.nonzero().flatten()[count // 2]
    seen[1, place] = 1.0
    wanted = carried(seen, theirs, ours, characters)
    assert wanted.sum(-1) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert wanted[:, ~ours.chunks].max() == 0
    start, end = theirs.offsets[count // 2]
    for index in wanted[1].nonzero().flatten() - ours.chunks.nonzero()[0]:
        first, last = ours.offsets[index]
        assert first < end
        assert last > start


def test_its_vocabulary_cuts_in_other_places_than_the_references(others, vocabulary):
    assert len(others) == 700
    assert others.tokenize("the lantern") != others.tokenize(" the lantern")
    assert pieces(others, "in 12") == ["in", "Ġ12"]
    assert pieces(vocabulary, "in 12") == ["in", "Ġ1", "2"]
    text = "  Here is “naïve”\n\n🙂 "
    assert others.decode(others(text)["input_ids"]) == text


def pieces(tokenizer: PreTrainedTokenizerFast, text: str) -> list[str]:
    """What merges stay within."""
    return [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_the_pace_warms_up_holds_and_decays(monkeypatch):
    monkeypatch.setattr(auxiliary, "STEPS", 1500)
    monkeypatch.setattr(auxiliary, "WARM_STEPS", 100)
    paces = [pace(step) for step in range(1500)]
    assert paces[:100] == sorted(paces[:100])
    assert paces[0] == 0.01
    assert set(paces[99:501]) == {1.0}
    assert paces[500:] == sorted(paces[500:], reverse=True)
    assert paces[1000] == pytest.approx(0.5)
    assert paces[-1] == 0.02
