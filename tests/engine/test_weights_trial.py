"""Calibration with weights in fewer bits: what it counts, keeps and tells."""

import json

import pytest
import tiny_kb
import torch
from test_calibration import QUESTIONS, few, open_kb  # noqa: F401
from transformers import DynamicCache

from kvweave.config import GenerationConfig
from kvweave.engine import verdicts
from kvweave.engine.answering.settings import AskOptions
from kvweave.engine.background.weights_trial import check_fewer, weights_trials
from kvweave.engine.components import Components
from kvweave.engine.state import no_progress
from kvweave.engine.verdicts import WeightsTrial, interval
from kvweave.errors import InvalidRequest, NotEnoughMemory
from kvweave.models.loading import load_model
from kvweave.recipes.methods import recipe_named
from kvweave.samples import DOCUMENTS
from kvweave.testing import tiny_adapter
from kvweave.types import Prompt

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def models():
    """The shipped model with the bits of weights that it has, and with fewer."""
    return {bits: load_model("reference", weights=bits) for bits in ("full", "int8", "int4")}


@torch.no_grad()
def greedy(adapter, prompt):
    """Return the ids of a reply by transformers' own cache."""
    kv_cache, end = DynamicCache(), adapter.tokenizer.eos_token_id
    found, ids = [], list(prompt.token_ids)
    while len(found) < NEW_TOKENS and end not in found:
        logits = adapter.model(torch.tensor([ids]), past_key_values=kv_cache, use_cache=True).logits
        ids = [int(logits[0, -1].argmax())]
        found += ids
    return found


def test_it_counts_the_replies_that_stay_the_same(models):
    """Counted again with the plain model, prompt by prompt."""
    documents = sorted(DOCUMENTS.glob("*.txt"))[:4]
    names = ("Glorric", "Sendbel", "Bertnis", "Fribble")
    prompts = [
        models["full"].template.render(
            Prompt("Answer.", (path.read_text()[:600],), f"What is the password of {name}?")
        )
        for path in documents
        for name in names
    ]
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS)
    options = AskOptions(recipe_named("full"), None, None, 1, "Answer.", generation, None, False, "off", None)
    found = list(
        weights_trials(models["full"], models.get, prompts, options, ("int8", "int4"), (0, 0), no_progress)
    )
    own = [greedy(models["full"], prompt) for prompt in prompts]
    for trial in found:
        other = [greedy(models[trial.weights], prompt) for prompt in prompts]
        first = sum(a[0] == b[0] for a, b in zip(own, other, strict=True))
        answers = sum(a == b for a, b in zip(own, other, strict=True))
        assert (trial.questions, trial.first_tokens, trial.answers) == (len(prompts), first, answers)
        assert trial.answers_interval == interval(answers, len(prompts))
        assert trial.keeps is (first == answers == len(prompts))
    assert found[1].answers < len(prompts)  # 4 bits change some reply of so small a model


@pytest.mark.parametrize(
    ("own", "wanted", "told"),
    [
        ("full", "int3", "this knowledge base has full weights; try int8 or int4"),
        ("int8", "int8", "this knowledge base has int8 weights; try int4"),
        ("int4", "int8", "this knowledge base has int4 weights; there are no fewer to try"),
    ],
)
def test_only_fewer_bits_are_tried(own, wanted, told):
    check_fewer(["int4"] if own != "int4" else [], own)
    with pytest.raises(InvalidRequest, match=told):
        check_fewer([wanted], own)


def test_the_verdict_tells_it_and_is_read_again(open_kb, few, tmp_path, monkeypatch):  # noqa: F811
    others = {"int8": tiny_adapter(), "int4": tiny_adapter(seed=1)}
    monkeypatch.setattr(Components, "model_with", lambda self, bits: others[bits])
    base = open_kb()
    verdict = base.calibrate(few, try_weights=("int8", "int4"))
    assert [each.weights for each in verdict.weights] == ["int8", "int4"]
    assert [each.keeps for each in verdict.weights] == [True, False]
    assert verdict.weights[0].answers == verdict.weights[0].questions == 4
    assert "int8 weights keep enough" in verdict.weights_told
    assert verdict.weights_told.endswith("make one with --weights int8")
    with tiny_kb.open_tiny(tmp_path / "home", recipe="auto", max_new_tokens=3) as again:
        assert again.calibration().verdict == verdict


def test_a_model_that_does_not_fit_loses_no_verdict(open_kb, few, monkeypatch):  # noqa: F811
    def full(self, bits):
        raise NotEnoughMemory("the weights do not fit")

    monkeypatch.setattr(Components, "model_with", full)
    base = open_kb()
    with pytest.raises(NotEnoughMemory):
        base.calibrate(few, try_weights=("int8",))
    verdict = base.calibration().verdict
    assert verdict is not None
    assert verdict.weights == ()
    with pytest.raises(InvalidRequest, match="try int8 or int4"):
        base.calibrate(QUESTIONS[:4], try_weights=("full",))


def test_verdicts_of_earlier_versions_are_read(open_kb, few):  # noqa: F811
    base = open_kb()
    verdict = base.calibrate(few)
    table = verdicts.VerdictTable(base._state.database)
    ((stored,),) = base._state.database.query("SELECT verdict FROM calibrations")
    earlier = {name: value for name, value in json.loads(stored).items() if name != "weights"}
    base._state.database.execute("UPDATE calibrations SET verdict = ?", (json.dumps(earlier),))
    found = table.find(base._auto.conditions())
    assert found is not None
    assert found[1] == verdict


def test_where_none_keeps_enough_it_says_so():
    trial = WeightsTrial("int8", 40, 39, 30, interval(39, 40), interval(30, 40), False)
    verdict = verdicts.Verdict("prefix", None, 0.0, "m", 0.98, 0.98, 40, 0, 0, 0.0, 1.0, 1.0, (), (trial,))
    assert verdict.weights_told.startswith(
        "weights stay as they are: of 40 questions int8 keeps 98% of first"
    )
