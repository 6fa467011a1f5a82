"""Calibration tries the model with fewer bits per weight: what it counts, what it says to do, and what it leaves behind."""

import dataclasses
import gc
import json
import warnings
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvweave
from kvweave.background import budget_trials, calibration, weights_trial
from kvweave.background.budget_trials import BudgetTrials
from kvweave.background.weights_trial import WeightsTrials, fewer_bits
from kvweave.config import read_config
from kvweave.errors import InvalidRequest, NotEnoughMemory, UnsupportedModel
from kvweave.knowledge_base import KnowledgeBase
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.models.quantised import held_bytes
from kvweave.recipes.candidates import candidates
from kvweave.state import calibration_results as verdicts
from kvweave.state.calibration_results import Measured
from kvweave.state.components import Components
from kvweave.state.resident import ResidentModels
from kvweave.state.tried_weights import TriedWeights, WeightsTrial
from kvweave.testing import tiny_model, tiny_tokenizer

RECIPE = "prefix"
GLORRIC = "What is the password of Glorric?"
QUESTIONS = (
    GLORRIC,
    "Who ordered what for supper, and why?",
    "Why did Bertnis leave?",
    "Tell me everything about badges.",
    "Is Sendbel older than Glorric?",
    "Say something nice.",
)
KEPT = (GLORRIC, "What is the password of Sendbel?", "What did Bertnis order?")
"""Questions that the reference model answers alike with 8 bits."""


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A few questions are enough for a verdict, and no budget is tried beside the weights."""
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: ())
    monkeypatch.setattr(calibration, "MIN_QUESTIONS", 2)


@pytest.fixture
def folder(tmp_path):
    """A random model whose layers are wide enough for 4 bits; it is loaded anew each time."""
    config = tiny_model().config
    config.update({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "random")
    tiny_tokenizer().save_pretrained(tmp_path / "random")
    return str(tmp_path / "random")


@pytest.fixture
def loaded(monkeypatch):
    """The models that are loaded to be tried, as weak references; the one before must be gone."""
    load, found = Components.load_with, []

    def recorded(components, bits):
        gc.collect()
        assert not [each for each in found if each() is not None]
        adapter = load(components, bits)
        found.append(weakref.ref(adapter.model))
        return adapter

    monkeypatch.setattr(Components, "load_with", recorded)
    return found


def replies(base, questions):
    """Return first token and answer of each question, by the model that the knowledge base was made with."""
    firsts = [
        int(kvweave.prefill(base.adapter, MemoryStore(), base.prompt(each), recipe="full").logits.argmax())
        for each in questions
    ]
    texts = [base.ask(each, recipe="full", cache="off").text.strip() for each in questions]
    return list(zip(firsts, texts, strict=True))


def trial(bits, size, keeps=True):
    return WeightsTrial(bits, size, 20, 20, 19, (0.84, 1.0), (0.76, 0.99), keeps)


# What is counted


@pytest.mark.parametrize("model", ["reference", "random"])
def test_counts_are_those_of_knowledge_bases_made_with_these_weights(open_kb, documents, folder, model):
    settings = {"max_new_tokens": 12, "chunk_tokens": 48, "top_k": 3, "device": "cpu"}
    named = {} if model == "reference" else {"model": folder}
    base = open_kb(**settings, **named)
    base.add(documents)
    tried = base.calibrate(QUESTIONS, try_weights=["int4", "int8", "int4"]).weights
    own = replies(base, QUESTIONS)
    assert (tried.own, tried.own_bytes) == ("full", held_bytes(base.adapter.model))
    assert [each.bits for each in tried.trials] == ["int8", "int4"]
    lost = 0
    for each in tried.trials:
        other = open_kb(each.bits, **settings, **named, weights=each.bits)
        other.add(documents)
        pairs = list(zip(own, replies(other, QUESTIONS), strict=True))
        first = sum(one[0] == two[0] for one, two in pairs)
        answers = sum(one[1] == two[1] for one, two in pairs)
        assert (each.questions, each.first_tokens, each.answers) == (len(QUESTIONS), first, answers)
        assert each.first_tokens_interval == verdicts.interval(first, len(QUESTIONS))
        assert each.answers_interval == verdicts.interval(answers, len(QUESTIONS))
        assert each.keeps is (first == answers == len(QUESTIONS))
        assert each.bytes == held_bytes(other.adapter.model)
        lost += len(QUESTIONS) - answers
    assert lost or model == "reference"  # random weights are changed enough to tell right from wrong


def test_a_model_in_8_bits_is_compared_with_4(open_kb, documents, folder):
    base = open_kb(model=folder, weights="int8", device="cpu", max_new_tokens=8)
    base.add(documents)
    tried = base.calibrate(QUESTIONS, try_weights=["int4"]).weights
    assert tried.own == "int8"
    assert tried.own_bytes == held_bytes(base.adapter.model)
    assert [each.bits for each in tried.trials] == ["int4"]
    with pytest.raises(InvalidRequest, match="made with --weights int8, and int8 is no fewer bits; try int4"):
        base.calibrate(QUESTIONS, try_weights=["int8"])


def test_the_least_shares_are_the_settings(open_kb, documents, folder):
    shares = {"calibrate_first_tokens": 0.0, "calibrate_answers": 0.0}
    base = open_kb(model=folder, device="cpu", max_new_tokens=8, **shares)
    base.add(documents)
    verdict = base.calibrate(QUESTIONS, try_weights=["int4"])
    assert verdict.weights.trials[0].answers < len(QUESTIONS)
    assert verdict.weights.trials[0].keeps
    assert "keep 0% of first tokens and 0% of answers" in verdict.weights_told


def test_budgets_with_fewer_bits_are_compared_with_the_models_own_replies(open_kb, documents, monkeypatch):
    """The cheapest two budgets lose a reply with 8 bits, so that the third is named; with full weights the first keeps enough."""
    base = open_kb(max_new_tokens=8)
    base.add(documents)
    reply, own, compared = weights_trial._reply, [], []

    def recorded(adapter, *rest):
        found = reply(adapter, *rest)
        if adapter.fingerprint.weight_bits == "full":
            own.append(found)
        return found

    def compare(self, context, candidate, prompt, options, full):
        bits = context.model.fingerprint.weight_bits
        compared.append((bits, candidate.key, full))
        return Measured(bits == "full" or candidate.key == tried[2].key, True, 0.25, 1.0)

    tried = candidates(None, "auto", None)[:3]
    monkeypatch.setattr(weights_trial, "_reply", recorded)
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: tried)
    monkeypatch.setattr(BudgetTrials, "_compare", compare)
    verdict = base.calibrate(KEPT, try_weights=["int8"])
    with_8 = [each for each in compared if each[0] == "int8"]
    lost_are_left_out = [*(each.key for each in tried), tried[2].key, tried[2].key]
    assert [key for _, key, _ in with_8] == lost_are_left_out
    assert all(any(full is one for one in own) for _, _, full in with_8)
    (found,) = verdict.weights.trials
    assert found.keeps
    assert (found.recipe, found.budget) == (tried[2].recipe.name, tried[2].recipe.ratio)
    assert verdict.recipe == tried[0].recipe.name
    assert f"{found.recipe} is the cheapest recipe that keeps enough with them" in verdict.weights_told


def test_budgets_with_fewer_bits_keep_what_a_knowledge_base_with_them_answers(
    open_kb, documents, monkeypatch
):
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: candidates(*given)[1:2])
    anything = {"calibrate_first_tokens": 0.0, "calibrate_answers": 0.0}
    base = open_kb(max_new_tokens=8, recipe="reuse", **anything)
    base.add(documents)
    own = replies(base, QUESTIONS)
    measure, found = BudgetTrials.measure, []

    def recorded(self, context, *rest):
        measured = measure(self, context, *rest)
        found.append((context.model.fingerprint.weight_bits, measured["reuse 0"]))
        return measured

    monkeypatch.setattr(BudgetTrials, "measure", recorded)
    base.calibrate(QUESTIONS, try_weights=["int8"])
    other = open_kb("other", weights="int8", max_new_tokens=8, recipe="reuse")
    other.add(documents)
    answers = [other.ask(each, cache="off").text.strip() for each in QUESTIONS]
    kept = [one.answer for bits, one in found if bits == "int8"]
    assert kept == [text == whole for text, (_, whole) in zip(answers, own, strict=True)]
    assert not all(kept)


# What is said


def test_the_fewest_bytes_that_keep_enough_are_chosen():
    def best(*trials, own_bytes=100):
        return TriedWeights("full", own_bytes, trials).best

    int8, int4 = trial("int8", 60), trial("int4", 50)
    assert best(int8, int4) is int4
    assert best(int8, trial("int4", 50, keeps=False)) is int8
    assert best(trial("int8", 60, keeps=False), int4) is int4
    assert best(int8, trial("int4", 60)) is int8  # layers too narrow for 4 bits have 8
    assert best(trial("int8", 60, keeps=False)) is None
    assert best(trial("int8", 100), own_bytes=100) is None  # a head that shares the embedding is held twice


def test_one_sentence_says_what_to_do():
    int8 = dataclasses.replace(trial("int8", 601_200_000), recipe="weave", budget=0.3)
    assert TriedWeights("full", 1_072_400_000, (int8,)).told(0.98, 0.9) == (
        "int8 weights are the cheapest that keep 98% of first tokens and 90% of answers: of 20 questions int8 keeps 100% of first "
        "tokens (95 % interval 84% to 100%) and 95% of answers (95 % interval 76% to 99%) in 601.2 MB instead of 1,072.4 MB, and "
        "weave at ratio 0.3 is the cheapest recipe that keeps enough with them; `kvweave add PATHS --weights int8 --kb NAME` makes "
        "a knowledge base that has them, and this one keeps its full weights, since its stored KV, answers and conversations are "
        "of them"
    )
    lossy = TriedWeights("full", 10**9, (trial("int8", 6 * 10**8, keeps=False),)).told(0.98, 0.98)
    assert lossy.startswith(
        "no fewer bits that were tried keep 98% of first tokens and 98% of answers, so stay with full weights in 1,000.0 MB: of 20 "
    )
    assert lossy.endswith(" in 600.0 MB")
    large = TriedWeights("full", 10**9, (trial("int8", 2 * 10**9),)).told(0.98, 0.98)
    assert large.startswith(
        "what keeps 98% of first tokens and 98% of answers takes no less memory than full weights in 1,000.0 MB: of 20 "
    )


def test_bits_that_are_no_fewer_are_refused():
    assert fewer_bits(["int4", "int8", "int4"], "full") == ("int8", "int4")
    assert fewer_bits(["int4"], "auto") == ("int4",)
    assert fewer_bits([], "int4") == ()
    for name in ("full", "auto", "int3", ""):
        with pytest.raises(InvalidRequest, match=f"weights '{name}' cannot be tried; try int8 or int4"):
            fewer_bits([name], "full")
    with pytest.raises(InvalidRequest, match="int4 is no fewer bits; there are no fewer to try"):
        fewer_bits(["int4"], "int4")


# What is kept


def test_a_verdict_is_read_again_and_an_older_one_has_no_weights(open_kb, documents):
    base = open_kb()
    base.add(documents)
    verdict = base.calibrate(QUESTIONS[:2], try_weights=["int8"])
    assert open_kb().calibration().verdict == verdict
    stored = dataclasses.asdict(verdict)
    store = "UPDATE calibrations SET verdict = ?"
    for name in ("recipe", "budget"):  # from before budgets were tried with them
        del stored["weights"]["trials"][0][name]
    base._state.database.execute(store, (json.dumps(stored),))
    assert open_kb().calibration().verdict == verdict
    del stored["weights"]
    base._state.database.execute(store, (json.dumps(stored),))
    older = open_kb().calibration().verdict
    assert older == dataclasses.replace(verdict, weights=None)
    assert older.weights_told == ""


def test_one_more_model_is_loaded_at_a_time_and_freed(open_kb, documents, folder, loaded):
    base = open_kb(model=folder, device="cpu", max_new_tokens=2)
    base.add(documents)
    own = base.model
    base.calibrate(QUESTIONS[:2], try_weights=["int8", "int4"])
    gc.collect()
    assert [each() for each in loaded] == [None, None]
    assert base.model is own
    assert base.ask(GLORRIC, cache="off").text == base.ask(GLORRIC, recipe="full", cache="off").text


def test_an_interrupted_trial_leaves_nothing(open_kb, documents, folder, loaded, monkeypatch):
    base = open_kb(model=folder, device="cpu", max_new_tokens=2)
    base.add(documents)
    put, done = WeightsTrials._put, []

    def interrupted(self, bits, question):
        put(self, bits, question)
        done.append(bits)
        if len(done) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(WeightsTrials, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        base.calibrate(QUESTIONS[:2], try_weights=["int8", "int4"])
    gc.collect()
    assert done == ["int8", "int8", "int4"]
    assert [each() for each in loaded] == [None, None]
    assert base.calibration().verdict is None
    assert not base._state.verdicts.measured(base._auto.conditions())
    assert not (base.folder / "calibration").exists()
    assert base.calibrate(QUESTIONS[:2]).weights is None


def test_documents_that_change_meanwhile_make_it_start_over(open_kb, documents, monkeypatch):
    base = open_kb(max_new_tokens=2)
    base.add(documents)
    put, done = WeightsTrials._put, []

    def changed(self, bits, question):
        put(self, bits, question)
        done.append(question)
        if len(done) == 1:
            base.remove(documents / "supper.md")

    monkeypatch.setattr(WeightsTrials, "_put", changed)
    verdict = base.calibrate(QUESTIONS[:2], try_weights=["int8"])
    assert done == [QUESTIONS[0], *QUESTIONS[:2]]
    assert verdict.weights.trials[0].questions == 2


# What cannot be


def test_too_little_memory_beside_the_first_model_is_said_and_measures_nothing(
    open_kb, documents, folder, monkeypatch
):
    base = open_kb(model=folder, device="cpu", max_new_tokens=2)
    base.add(documents)
    monkeypatch.setattr("kvweave.models.precision.available_memory_bytes", lambda: 1000)
    with pytest.raises(NotEnoughMemory) as refused:
        base.calibrate(QUESTIONS, try_weights=["int8"])
    said = str(refused.value)
    assert (
        "for its weights in int8, and 0 MB of memory are left, beside the knowledge base's own model" in said
    )
    assert said.endswith("; free memory, or leave out --try-weights int8")
    assert base.calibration().verdict is None
    assert base.calibrate(QUESTIONS).weights is None  # the first model is loaded


def test_a_model_that_is_run_plainly_is_refused(open_kb, documents, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny_model("qwen3-next").save_pretrained(tmp_path / "hybrid")
    tiny_tokenizer().save_pretrained(tmp_path / "hybrid")
    base = open_kb(model=str(tmp_path / "hybrid"), device="cpu")
    base.add(documents)
    with pytest.raises(UnsupportedModel):
        base.calibrate(QUESTIONS, try_weights=["int8"])


def test_resident_models_stay_as_they_are(open_kb, documents, folder, loaded, tmp_path):
    with open_kb(model=folder, device="cpu", max_new_tokens=2) as base:
        base.add(documents)
    config = read_config(tmp_path / "home", model=folder, device="cpu", recipe="prefix", max_new_tokens=2)
    resident = ResidentModels(config)
    try:
        with KnowledgeBase("notes", config, resident) as served:
            model = resident.model
            assert served.calibrate(QUESTIONS[:2], try_weights=["int8"]).weights.own == "full"
            assert served.model is resident.model is model
            assert served.ask(GLORRIC, cache="off").text is not None
    finally:
        resident.close()
    assert len(loaded) == 1
