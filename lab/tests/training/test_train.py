"""A training run of a tiny model: a resumed run equals an uninterrupted one."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from training import train
from training.plan import DECAY_FROM, WARM_STEPS, Stage, configuration, draw_stage, rate_factor
from training.rows import COPY, RowMaker, Rows
from training.shape import Shape
from training.train import Trainer

SHORT = Shape(context=250, questions=200, chunks=(2, 2), chunk_tokens=(40, 60), sparse=0.0, easy=0.9)
LONGER = Shape(context=400, questions=250, chunks=(2, 3), chunk_tokens=(60, 90), sparse=0.0, easy=0.3)
PLAN = (
    Stage(4, SHORT, rows=4, copying=0.2, rate=0.3),
    Stage(3, LONGER, rows=2, copying=0.2, rate=0.3, hinting=0.3),
)
SEED, STEPS = 7, sum(stage.steps for stage in PLAN)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}


def tiny(tokenizer, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(configuration(tokenizer, max_position_embeddings=1024, **SIZES))


@pytest.fixture(scope="module", autouse=True)
def _small(uncompiled):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "PLAN", PLAN)
        patch.setattr(train, "new_model", tiny)
        patch.setattr(Trainer, "save_steps", 2)
        patch.setattr(train, "REPORT_STEPS", 3)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, vocabulary, _small) -> Path:
    """The folder of an uninterrupted run."""
    path = tmp_path_factory.mktemp("finished")
    vocabulary.save_pretrained(path)
    Trainer(path, SEED, rank=0, ranks=1).run()
    return path


def state(path: Path) -> dict:
    return torch.load(path / "checkpoint.pt", weights_only=True)


def stop_at(monkeypatch, step: int) -> None:
    """Interrupt a run in this step."""
    original = Trainer.train_step

    def interrupted(self: Trainer, stage: Stage, rate: float) -> None:
        original(self, stage, rate)
        if self.step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train_step", interrupted)


def tensors(state: dict) -> Iterator[tuple[str, torch.Tensor]]:
    yield from state["model"].items()
    for number, kept in state["optimizer"]["state"].items():
        yield from ((f"{number}/{name}", value) for name, value in kept.items())


class TestTrainer:
    @pytest.mark.parametrize("stopped", [3, 5])  # in the first stage, in the second
    def test_a_resumed_run_equals_an_uninterrupted_one(
        self, finished, tmp_path, vocabulary, monkeypatch, stopped
    ):
        vocabulary.save_pretrained(tmp_path)
        with monkeypatch.context() as patch:
            stop_at(patch, stopped)
            with pytest.raises(KeyboardInterrupt):
                Trainer(tmp_path, SEED, rank=0, ranks=1).run()
        resumed = Trainer(tmp_path, SEED, rank=0, ranks=1)
        assert resumed.step == stopped - 1
        resumed.run()
        one, other = state(finished), state(tmp_path)
        again = dict(tensors(other))
        assert all(torch.equal(kept, again.pop(name)) for name, kept in tensors(one))
        assert not again
        assert one["accuracy"] == other["accuracy"]
        for weights, weights_again in zip(one["ended"], other["ended"], strict=True):
            assert all(torch.equal(weight, weights_again[name]) for name, weight in weights.items())
        (*counts, _, loss), (*counts_again, _, loss_again) = one["progress"], other["progress"]
        assert (counts, loss) == (counts_again, loss_again)

    def test_learns_and_logs_its_progress(self, finished, vocabulary):
        trained, before = state(finished), tiny(vocabulary, SEED).state_dict()
        assert not any(torch.equal(weight, before[name]) for name, weight in trained["model"].items())
        first, last = (json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines())
        assert (first["step"], last["step"]) == (3, 6)
        assert last["loss"] < first["loss"]
        assert 0 < first["tokens"] < last["tokens"] < trained["progress"][1]
        assert COPY in last["accuracy"]
        assert len(last["accuracy"]) > 3

    @pytest.mark.parametrize(("seed", "scale"), [(SEED + 1, 1.0), (SEED, 2.0)])
    def test_another_seed_or_plan_is_refused(self, finished, seed, scale):
        with pytest.raises(SystemExit, match="holds a run with another seed or plan; name another folder"):
            Trainer(finished, seed, rank=0, ranks=1, scale=scale)

    def test_exports_the_mean_of_its_stages_tokenizer_and_training_facts(self, finished, vocabulary):
        folder, saved = finished / "model", state(finished)
        facts = json.loads((folder / "training.json").read_text())
        assert (facts["seed"], facts["steps"], facts["tokens"]) == (SEED, STEPS, saved["progress"][1])
        assert facts["torch"] == torch.__version__
        assert facts["averaged"] == len(PLAN)
        assert [stage["steps"] for stage in facts["plan"]] == [stage.steps for stage in PLAN]
        model = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert model.keys() == saved["model"].keys()
        first, second = saved["ended"]
        assert all(torch.equal(second[name], weight) for name, weight in saved["model"].items())
        for name, weight in model.items():
            assert not torch.equal(first[name], second[name])
            assert torch.equal(weight, ((first[name] + second[name]) / 2).bfloat16())
        text = "Brenek's locker is number 42."
        assert AutoTokenizer.from_pretrained(folder)(text) == vocabulary(text)


def test_processes_divide_the_rows_of_a_step(tmp_path, vocabulary, monkeypatch):
    vocabulary.save_pretrained(tmp_path)
    monkeypatch.setattr(train.dist, "all_reduce", lambda flat: None)
    batches: list[set[str]] = []
    batch = RowMaker.batch

    def recorded(self: RowMaker, shape: Shape, seeds: list[str], copying: float) -> Rows:
        batches.append(set(seeds))
        return batch(self, shape, seeds, copying)

    monkeypatch.setattr(RowMaker, "batch", recorded)
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        Trainer(tmp_path, SEED, rank, ranks).train_step(PLAN[0], PLAN[0].rate)
    everything, first, second = batches
    assert len(everything) == PLAN[0].rows
    assert first | second == everything
    assert not first & second


def test_rows_that_cannot_be_divided_evenly_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["train", str(tmp_path / "run"), "--processes=3"])
    with pytest.raises(SystemExit):
        train.main()
    assert "cannot be divided evenly among 3 processes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_settling_stage_has_its_own_rate_and_sometimes_longer_rows():
    settling = replace(SHORT, spliced=0.5, stopping=1.0)
    plan = (*PLAN, Stage(1000, settling, rows=4, copying=0.2, rate=0.1, holding=0.5))
    draws = [draw_stage(plan, step, SEED) for step in range(STEPS, STEPS + 1000)]
    rates = [rate for _, rate in draws]
    assert set(rates[:500]) == {0.1}
    assert rates[500:] == sorted(rates[500:], reverse=True)
    assert rates[750] == pytest.approx(0.05)
    assert {(stage.shape.spliced, stage.shape.stopping) for stage, _ in draws} == {(0.5, 1.0)}
    longer = sum(stage.shape.context == LONGER.context for stage, _ in draws)
    assert 300 < longer < 400
    assert [draw_stage(plan, step, SEED)[0] for step in range(4)] == [PLAN[0]] * 4


def test_the_rate_factor_warms_up_stays_and_decays():
    steps = 5000
    factors = [rate_factor(step, steps) for step in range(steps)]
    top = round(DECAY_FROM * steps)
    assert factors[:WARM_STEPS] == sorted(factors[:WARM_STEPS])
    assert 0 < factors[0] <= 0.02
    assert set(factors[WARM_STEPS : top - 1]) == {1.0}
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert factors[(top + steps) // 2] == pytest.approx(0.5, abs=0.01)
    assert factors[-1] == 0.02
