"""The reference model is refined in cycles, from the weights of another training."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from training import refine, settle
from training.plan import LOWEST_FACTOR, Stage, configuration
from training.refine import RefiningTrainer, rate_factor
from training.settle import SettlingTrainer
from training.shape import Shape
from training.train import main

SEED = 3
SHORT = Shape(
    context=300, questions=200, chunks=(2, 2), chunk_tokens=(40, 60), sparse=0.0, easy=0.0, varied=1.0
)
LONG = {"context": 500, "questions": 250, "chunks": (2, 3), "chunk_tokens": (60, 90)}
CYCLES = tuple(Stage(2, SHORT, 2, 0.2, 0.01, 0.1, 0.5, longer) for longer in (0.0, 1.0))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


@pytest.fixture(scope="module", autouse=True)
def _small(uncompiled):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refine, "CYCLES", CYCLES)
        patch.setattr(refine, "LONG_ROWS", LONG)
        patch.setattr(settle, "CYCLES", CYCLES)
        yield


@pytest.fixture
def base(tmp_path, vocabulary):
    """The model of a finished run of `training.train`, in its folder."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(configuration(vocabulary, max_position_embeddings=1024, **SIZES))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base" / "model")
    vocabulary.save_pretrained(tmp_path / "base" / "model")
    return model


def test_a_run_starts_from_the_base_and_exports_the_mean_of_both(base, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    RefiningTrainer.prepare(folder, SEED)
    trainer = RefiningTrainer(folder, SEED, 0, 1)
    for one, other in zip(trainer.parameters, base.parameters(), strict=True):
        assert torch.equal(one, other.float())
    trainer.run()
    result = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for name, weight in result.state_dict().items():
        before, after = base.state_dict()[name].float(), trainer.model.state_dict()[name]
        assert not torch.equal(before, trainer.final_weights[1][name])
        torch.testing.assert_close(trainer.final_weights[0][name], before)
        halfway = (before + trainer.final_weights[1][name]) / 2
        torch.testing.assert_close(weight, halfway, atol=0.01, rtol=0.01)  # stored in bfloat16
        torch.testing.assert_close(after, halfway)
    facts = json.loads((folder / "model" / "training.json").read_text())
    assert (facts["steps"], facts["averaged"], facts["seed"]) == (4, 2, SEED)


def test_settling_starts_from_a_refined_model_and_exports_the_mean_of_three(base, tmp_path):
    refined, settled = tmp_path / "refined", tmp_path / "settled"
    for folder, kind in ((refined, RefiningTrainer), (settled, SettlingTrainer)):
        folder.mkdir()
        kind.prepare(folder, SEED)
        trainer = kind(folder, SEED, 0, 1)
        trainer.run()
    start, first, last = trainer.final_weights
    result = AutoModelForCausalLM.from_pretrained(settled / "model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(refined / "model", dtype=torch.float32).state_dict()
    for name, weight in result.state_dict().items():
        assert torch.equal(start[name], before[name])
        assert not torch.equal(first[name], last[name])
        torch.testing.assert_close(weight, (start[name] + first[name] + last[name]) / 3, atol=0.01, rtol=0.01)
    facts = json.loads((settled / "model" / "training.json").read_text())
    assert facts["averaged"] == 3
    assert facts["earlier"] == json.loads((refined / "model" / "training.json").read_text())
    assert "earlier" not in facts["earlier"]  # this base has no training facts


def test_the_share_of_long_rows_is_the_cycles(base, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    RefiningTrainer.prepare(folder, SEED)
    trainer = RefiningTrainer(folder, SEED, 0, 1)
    shapes = []
    for trainer.step in range(4):
        shapes.append(trainer.next_stage()[0].shape)
    assert shapes == [SHORT, SHORT, replace(SHORT, **LONG), replace(SHORT, **LONG)]


def test_a_missing_base_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"there is no model in .*/base/model; train that model first"):
        RefiningTrainer.prepare(tmp_path / "run", SEED)


def test_long_rows_also_have_to_be_divided_evenly(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(refine, "CYCLES", (replace(CYCLES[0], rows=6),))
    monkeypatch.setattr("sys.argv", ["refine", str(tmp_path / "run"), "--processes=3"])
    with pytest.raises(SystemExit):
        main(RefiningTrainer, "training.refine")
    assert "cannot be divided evenly among 3 processes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_rate_rises_stays_and_falls():
    factors = [rate_factor(step, 1000, 0.3) for step in range(1000)]
    assert factors[:100] == sorted(factors[:100])
    assert factors[0] == pytest.approx(0.01)
    assert factors[99:300] == pytest.approx([1.0] * 201)
    assert factors[300:] == sorted(factors[300:], reverse=True)
    assert factors[-1] == LOWEST_FACTOR
