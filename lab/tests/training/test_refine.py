"""The reference model is refined in cycles, from the weights that another training left."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from training import refine, settle
from training.plan import LOWEST_PACE, Stage, configuration
from training.refine import RefiningTrainer, pace
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
        patch.setattr(refine, "_LONG", LONG)
        patch.setattr(settle, "CYCLES", CYCLES)
        yield


@pytest.fixture
def base(tmp_path, vocabulary):
    """A model to go on from, where a run of `training.train` leaves it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(configuration(vocabulary, max_position_embeddings=1024, **SIZES))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base" / "model")
    vocabulary.save_pretrained(tmp_path / "base" / "model")
    return model


def test_a_run_starts_from_the_weights_before_and_exports_what_lies_halfway(base, tmp_path):
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
        assert not torch.equal(before, trainer.ended[1][name])
        torch.testing.assert_close(trainer.ended[0][name], before)
        halfway = (before + trainer.ended[1][name]) / 2
        torch.testing.assert_close(weight, halfway, atol=0.01, rtol=0.01)  # kept in bfloat16
        torch.testing.assert_close(after, halfway)
    facts = json.loads((folder / "model" / "training.json").read_text())
    assert (facts["steps"], facts["averaged"], facts["seed"]) == (4, 2, SEED)


def test_settling_goes_on_from_a_refined_model_and_exports_the_mean_of_all_it_came_by(base, tmp_path):
    refined, settled = tmp_path / "refined", tmp_path / "settled"
    for folder, kind in ((refined, RefiningTrainer), (settled, SettlingTrainer)):
        folder.mkdir()
        kind.prepare(folder, SEED)
        trainer = kind(folder, SEED, 0, 1)
        trainer.run()
    start, first, last = trainer.ended
    result = AutoModelForCausalLM.from_pretrained(settled / "model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(refined / "model", dtype=torch.float32).state_dict()
    for name, weight in result.state_dict().items():
        assert torch.equal(start[name], before[name])
        assert not torch.equal(first[name], last[name])
        torch.testing.assert_close(weight, (start[name] + first[name] + last[name]) / 3, atol=0.01, rtol=0.01)
    facts = json.loads((settled / "model" / "training.json").read_text())
    assert facts["averaged"] == 3
    assert facts["earlier"] == json.loads((refined / "model" / "training.json").read_text())
    assert "earlier" not in facts["earlier"]  # the base here says nothing of how it was made


def test_rows_are_long_ones_as_often_as_the_cycle_says(base, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    RefiningTrainer.prepare(folder, SEED)
    trainer = RefiningTrainer(folder, SEED, 0, 1)
    shapes = []
    for trainer.step in range(4):
        shapes.append(trainer.lesson()[0].shape)
    assert shapes == [SHORT, SHORT, replace(SHORT, **LONG), replace(SHORT, **LONG)]


def test_without_a_model_to_go_on_from_it_says_which_one_is_missing(tmp_path):
    with pytest.raises(SystemExit, match=r"nothing to go on from in .*/base/model; train that model first"):
        RefiningTrainer.prepare(tmp_path / "run", SEED)


def test_long_rows_too_have_to_be_shared_out_evenly(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(refine, "CYCLES", (replace(CYCLES[0], rows=6),))
    monkeypatch.setattr("sys.argv", ["refine", str(tmp_path / "run"), "--processes=3"])
    with pytest.raises(SystemExit):
        main(RefiningTrainer, "training.refine")
    assert "cannot be shared out evenly among 3 processes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_rate_rises_is_held_and_falls():
    paces = [pace(step, 1000, 0.3) for step in range(1000)]
    assert paces[:100] == sorted(paces[:100])
    assert paces[0] == pytest.approx(0.01)
    assert paces[99:300] == pytest.approx([1.0] * 201)
    assert paces[300:] == sorted(paces[300:], reverse=True)
    assert paces[-1] == LOWEST_PACE
