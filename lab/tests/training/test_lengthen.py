"""Training on long texts: rows with distant evidence, and a run that can be interrupted."""

import json

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  torch's own name for it
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from kvweave_lab.eval.long_texts import MIN_DISTANCE
from training import lengthen
from training.lengthen import LongTrainer
from training.long_rows import LongRowMaker, of_length
from training.network import hidden_states, rotation
from training.plan import Stage, configuration
from training.rows import COUNTED
from training.shape import Shape

SEED = 5
SHORT = Shape(context=300, questions=200, chunks=(2, 2), chunk_tokens=(40, 60), sparse=0.0, easy=0.9)
PLAN = (Stage(3, SHORT, 2, 0.2, 0.01), Stage(3, of_length(700), 2, 0.0, 0.01))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


def start(folder, vocabulary) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(configuration(vocabulary, max_position_embeddings=512, **SIZES))
    model.save_pretrained(folder / "start")
    vocabulary.save_pretrained(folder)


@pytest.fixture(scope="module", autouse=True)
def _small(uncompiled):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lengthen, "LONG_PLAN", PLAN)
        patch.setattr(lengthen, "POSITIONS", 2048)
        patch.setattr(LongTrainer, "save_steps", 2)
        yield


def test_rows_weight_answers_with_distant_evidence_and_their_ends(vocabulary):
    rows = LongRowMaker(vocabulary).batch(of_length(1500), ["a", "b", "c"], 0.0)
    assert rows.ids.shape == (3, 1500)
    assert int(rows.tokens) == 4500
    assert bool((rows.segments == 0).all())
    counted = rows.tasks >= 0
    assert counted.any(1).all()
    assert {COUNTED[number] for number in rows.tasks[counted].tolist()} <= {"reasoning", "dialogue", "story"}
    assert bool((rows.weights[counted] > 1).all())
    first = [int(own.nonzero()[0]) for own in counted]
    assert min(first) > MIN_DISTANCE
    for row, place in rows.ends.nonzero().tolist():
        assert int(rows.ids[row, place]) != vocabulary.eos_token_id
        assert rows.weights[row, place] == 1


def test_a_row_without_questions_equals_the_unmodified_model(vocabulary, tmp_path):
    start(tmp_path, vocabulary)
    model = LongTrainer.loaded(tmp_path / "start").eval()
    ids = torch.randint(3, 400, (1, 600))
    cos, sin = (part[None, None, :600] for part in rotation(2048, 8, 1_000_000.0))
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        got, _ = hidden_states(model, ids, cos, sin, torch.zeros_like(ids), 600)
    torch.testing.assert_close(got, expected, atol=0.06, rtol=0.06)  # matrix products in bfloat16


def test_the_fused_kernel_gives_long_rows_the_same_gradients(vocabulary, tmp_path, monkeypatch):
    start(tmp_path, vocabulary)
    ids = torch.randint(3, 400, (1, 200))
    cos, sin = (part[None, None, :200] for part in rotation(2048, 8, 1_000_000.0))
    found, fused = [], []
    kernel = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: fused.append(kwargs) or kernel(*args, **kwargs),
    )
    for fused_from, calls in ((10_000, 0), (100, SIZES["num_hidden_layers"])):
        monkeypatch.setattr("training.network.FUSED_FROM", fused_from)
        model = LongTrainer.loaded(tmp_path / "start")
        hidden_states(model, ids, cos, sin, torch.zeros_like(ids), 200)[0].square().sum().backward()
        found.append([weight.grad.clone() for weight in model.parameters()])
        assert len(fused) == calls
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.02 * one.norm()  # products in bfloat16


def test_a_resumed_run_equals_an_uninterrupted_one_and_exports_more_positions(
    vocabulary, tmp_path, monkeypatch
):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        folder.mkdir()
        start(folder, vocabulary)
    LongTrainer(whole, SEED, 0, 1).run()
    original = LongTrainer.train_step

    def interrupted(self, stage, rate):
        original(self, stage, rate)
        if self.step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LongTrainer, "train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            LongTrainer(stopped, SEED, 0, 1).run()
    resumed = LongTrainer(stopped, SEED, 0, 1)
    assert resumed.step == 4
    resumed.run()
    one, other = (AutoModelForCausalLM.from_pretrained(folder / "model") for folder in (whole, stopped))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    config = AutoConfig.from_pretrained(whole / "model")
    assert config.max_position_embeddings == 2048
    assert config.rope_parameters["rope_theta"] == 1_000_000.0
    facts = json.loads((whole / "model" / "training.json").read_text())
    assert (facts["steps"], facts["averaged"]) == (6, 1)
