"""Calibration of a knowledge base: what it chooses, what that changes, and how long it holds."""

from dataclasses import replace

import pytest

import kvweave
from kvweave.answering.generation import Decoded
from kvweave.background import budget_trials, calibration, jobs
from kvweave.background.budget_trials import BudgetTrials
from kvweave.background.calibration import Calibrator
from kvweave.background.prediction import QuestionPredictor
from kvweave.errors import InvalidRequest, StoreFull
from kvweave.files import try_lock
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.candidates import candidates
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run
from kvweave.state import calibration_results
from kvweave.state.calibration_results import Measured, Trial, chosen, kept_share, summarised
from kvweave.types import Prompt
from support import tiny_kb

ANYTHING = {"calibrate_tokens": 0.0}
CHEAPEST = "reuse"
QUESTIONS = [f"Where is the {river * 5} river of note {n}?" for n in range(7) for river in "xyz"][:20]


@pytest.fixture
def few(monkeypatch):
    """Four questions are enough for a verdict, and two budgets are tried."""
    made = budget_trials.candidates
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: made(*given)[:2])
    monkeypatch.setattr(calibration, "MIN_QUESTIONS", 4)
    return QUESTIONS[:4]


@pytest.fixture
def open_kb(tiny, tmp_path):
    """Opens one knowledge base of the tiny model with three documents; closes what it has opened."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(tiny_kb.text(number, parts=1))
    opened = []

    def make(**settings):
        given = {"recipe": "auto", "max_new_tokens": 3, "idle_power": "any", **settings}
        opened.append(tiny_kb.open_tiny(tmp_path / "home", **given))
        return opened[-1]

    make(recipe="prefix").add(folder)  # prepares nothing
    yield make
    for base in opened:
        base.close()


# The rule


def test_few_questions_leave_much_to_what_other_models_have_shown():
    assert kept_share([], 0.9)[0] == 0.9
    some, many = kept_share([1.0] * 4, 0.9), kept_share([1.0] * 36, 0.9)
    assert (some[0], many[0]) == (pytest.approx(0.95), pytest.approx(0.99))
    assert some[1][1] - some[1][0] > many[1][1] - many[1][0]
    low, high = kept_share([0.8, 1.0] * 18, 0.9)[1]  # spread 0.1 over 40 questions
    assert (low, high) == (pytest.approx(0.8686, abs=1e-3), pytest.approx(0.9314, abs=1e-3))


def test_a_trial_is_decided_once_its_whole_interval_is_on_one_side():
    def trial(share, questions):
        measured = [Measured(share, True, share == 1, 0.5, 9.0)] * questions
        return summarised("weave", 0.1, 2, 0.95, measured, 0.95)

    assert (trial(0.95, 8).keeps, trial(0.95, 8).decided) == (True, None)
    assert (trial(1.0, 4).keeps, trial(1.0, 4).decided) == (True, None)
    assert (trial(1.0, 12).keeps, trial(1.0, 12).decided) == (True, True)
    assert (trial(0.8, 1).keeps, trial(0.8, 1).decided) == (False, None)
    assert (trial(0.5, 3).keeps, trial(0.5, 3).decided) == (False, None)  # too few, whatever they say
    assert (trial(0.8, 6).keeps, trial(0.8, 6).decided) == (False, False)


def test_the_cheapest_by_passes_then_bytes_then_offline_passes_is_chosen():
    def trial(name, passes, bytes_per_token, offline, keeps=True):
        return Trial(name, 0.1, 20, 0.9, (0, 1), 20, 20, passes, bytes_per_token, offline, keeps, None)

    lossy, slow = trial("lossy", 0.1, 1, 1, keeps=False), trial("slow", 0.3, 1, 1)
    large, small, long = (
        trial("large", 0.204, 9, 1),
        trial("small", 0.196, 5, 2),
        trial("long", 0.196, 5, 3),
    )
    assert chosen([lossy, slow, large, long, small]) is small
    assert chosen([lossy, slow]) is slow
    assert chosen([lossy]) is None


# Calibrating


def test_it_chooses_the_cheapest_that_keeps_enough_of_the_answers(open_kb, monkeypatch):
    monkeypatch.setattr(calibration, "MIN_QUESTIONS", 6)
    base = open_kb()
    verdict = base.calibrate(QUESTIONS[:6])
    assert (verdict.given, verdict.asked, verdict.predicted) == (6, 0, 0)
    assert verdict.seconds > 0
    assert verdict.passes > 1
    best = chosen(verdict.trials)
    assert (verdict.recipe, verdict.budget) == ("prefix", 0) if best is None else (best.recipe, best.budget)
    assert not (base.folder / "calibration").exists()


def test_tokens_count_that_are_chosen_behind_full_attentions_own(open_kb, few):
    base = open_kb(**ANYTHING)
    (trial, _) = base.calibrate(few).trials
    adapter, shares = base.adapter, []

    def chosen_behind(result, ids):
        logits = [result.logits, *(adapter.step(result.kv_cache, token) for token in ids)]
        return [int(each.argmax()) for each in logits]

    for question in few:
        prompt = base.prompt(question)
        ids = kvweave.generate(prefilled(base, prompt, "full"), max_new_tokens=3).ids
        full, own = (chosen_behind(prefilled(base, prompt, name), ids) for name in ("full", trial.recipe))
        shares.append(sum(a == b for a, b in zip(own, full, strict=True)) / len(full))
    assert trial.tokens == pytest.approx(kept_share(shares, candidates(None, "auto", None)[0].prior)[0])
    assert trial.answers == shares.count(1.0)
    assert 0 < sum(shares) < len(shares)


def prefilled(base, prompt, recipe):
    return run(
        recipe_named(recipe, storage=None), base.adapter, base.store, base.adapter.template.render(prompt)
    )


def test_an_answer_that_ends_at_once_counts_by_its_end(open_kb, few, monkeypatch):
    monkeypatch.setattr(budget_trials, "generate_all", lambda *given: Decoded())
    verdict = open_kb(**ANYTHING).calibrate(few)
    assert {trial.questions for trial in verdict.trials} == {4}
    assert all(trial.answers == trial.first_tokens for trial in verdict.trials)


def test_recomputing_everything_keeps_every_token(open_kb, few, monkeypatch):
    made = candidates(None, "auto", None)[-1]
    everything = replace(made, recipe=replace(made.recipe, ratio=1.0))
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: [everything])
    (trial,) = open_kb().calibrate(few).trials
    assert trial.first_tokens == trial.answers == trial.questions
    assert trial.tokens == kept_share([1.0] * trial.questions, everything.prior)[0]


def test_it_stops_once_the_cheapest_that_is_left_keeps_enough(open_kb, few, monkeypatch):
    monkeypatch.setattr(BudgetTrials, "compare", lambda *given: Measured(1.0, True, True, 0.1, 1.0))
    verdict = open_kb().calibrate(QUESTIONS)
    assert verdict.recipe == CHEAPEST
    assert max(trial.questions for trial in verdict.trials) < len(QUESTIONS)


def test_kv_that_is_prepared_is_not_computed_again_for_trials(open_kb, few, monkeypatch):
    base = open_kb(recipe="auto")
    base.prepare()
    computed = []
    encode = Adapter.encode
    monkeypatch.setattr(Adapter, "encode", lambda *given: computed.append(1) or encode(*given))
    base.calibrate(few)
    assert not computed


def test_a_choice_is_used_prepared_told_and_shared(open_kb, few, tmp_path):
    base = open_kb(**ANYTHING)
    before = base.ask(QUESTIONS[0])
    assert before.plan.recipe == "weave-shifted"
    assert before.plan.auto == "weave-shifted, since it was not calibrated; run `kvweave calibrate`"
    assert base.calibrate(few).recipe == CHEAPEST
    after = base.ask(QUESTIONS[0])
    assert after.plan.cache_hit is None  # the answer of another recipe is another answer
    assert after.plan.recipe == CHEAPEST
    assert {span.origin for span in after.plan.spans if span.kind == "chunk"} <= {"exact", "reused"}
    assert after.plan.auto.startswith(f"{CHEAPEST}, since 2")
    assert "of 4 answers" in after.plan.auto
    assert base.ask(QUESTIONS[0]).plan.recipe == CHEAPEST
    assert base.ask(QUESTIONS[0], recipe=CHEAPEST).plan.cache_hit is not None
    assert base.missing_kv() == 0

    # A budget and a preparation of one's own, and another recipe
    plan = base.ask(QUESTIONS[0], ratio=0.2, cache="off").plan
    assert (plan.recipe, plan.ratio) == ("weave-shifted", 0.2)
    assert (
        base.ask(QUESTIONS[0], recipe="auto", prepare="similar", cache="off").plan.recipe
        == "similar+weave-shifted"
    )
    assert base.ask(QUESTIONS[0], recipe="reuse", cache="off").plan.auto == ""

    # Other processes, and other settings
    assert open_kb(**ANYTHING).calibration().result.recipe == CHEAPEST
    other = open_kb(**ANYTHING, top_k=2).calibration()
    assert other.result is None
    assert "the latest calibration is for top_k 3, not 2" in other.summary

    new = tmp_path / "new.txt"
    new.write_text("Another note, of one part.")
    assert base.add(new).chunk_kv_computed == 1
    kinds = [each.kind for each in base.store.versions(base.adapter.fingerprint, [_ids(base, new)])[0]]
    assert kinds == ["isolated-int8"]


def _ids(base, path):
    return tuple(base.adapter.template.chunk_ids(path.read_text()))


def test_a_ratio_of_the_choice_is_part_of_the_answers_settings(open_kb, few, monkeypatch):
    (budget,) = (each for each in candidates(None, "auto", None) if each.key == "weave-shifted 0.1")
    monkeypatch.setattr(budget_trials, "candidates", lambda *given: [budget])
    base = open_kb(**ANYTHING)
    verdict = base.calibrate(few)
    assert (verdict.recipe, verdict.ratio, verdict.budget) == ("weave-shifted", 0.1, 0.1)
    assert base.ask(QUESTIONS[0]).plan.ratio == 0.1
    assert base.ask(QUESTIONS[0], recipe="weave-shifted", ratio=0.1).plan.cache_hit is not None
    assert base.ask(QUESTIONS[0], recipe="weave-shifted").plan.cache_hit is None
    assert base.ask(QUESTIONS[0], coverage=0.5, cache="off").plan.coverage == 0.5


def test_where_nothing_keeps_enough_it_is_prefix(open_kb, few, monkeypatch):
    monkeypatch.setattr(BudgetTrials, "compare", lambda *given: Measured(0.5, True, False, 0.1, 1.0))
    base = open_kb()
    verdict = base.calibrate(QUESTIONS[:8])
    assert (verdict.recipe, verdict.ratio) == ("prefix", None)
    assert {trial.questions for trial in verdict.trials} == {4}  # what has lost is not tried further
    best = max(verdict.trials, key=lambda trial: trial.tokens)
    assert "no cheaper recipe keeps 95%" in verdict.summary
    assert (
        f"{best.recipe} at ratio {best.budget:g} keeps {best.tokens:.1%}, which `--tokens 0."
        in verdict.summary
    )
    assert base.ask(QUESTIONS[0]).plan.recipe == "prefix"


def test_too_few_questions_are_refused(open_kb):
    with pytest.raises(InvalidRequest, match="7 questions are given, and a calibration needs 8"):
        open_kb().calibrate(QUESTIONS[:7])


def test_an_interrupted_calibration_continues(open_kb, few, monkeypatch):
    base, measured, measure = open_kb(**ANYTHING), [], Calibrator.measure

    def interrupted(self, question, *rest):
        if len(measured) == 2:
            measured.append("interrupt")
            raise KeyboardInterrupt
        measured.append(question)
        measure(self, question, *rest)

    monkeypatch.setattr(Calibrator, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        base.calibrate(few)
    assert base.calibration().result is None
    assert base.calibrate(few).questions == 4
    assert measured == [*few[:2], "interrupt", *few[2:]]


def test_two_at_once_are_refused(open_kb, few):
    base = open_kb()
    with (
        try_lock(base.folder / "idle.lock"),
        pytest.raises(InvalidRequest, match="another process calibrates"),
    ):
        base.calibrate(few)


def test_a_disk_without_room_for_a_trial_measures_nothing(open_kb, few, monkeypatch):
    base = open_kb(**ANYTHING)
    monkeypatch.setattr(ChunkStore, "put", lambda *given, **named: False)
    with pytest.raises(StoreFull, match="calibration measures nothing"):
        base.calibrate(few)
    assert not base.state.calibrations.measured(base.auto.conditions())
    assert base.calibration().result is None


# How long a verdict holds


def test_it_holds_whatever_least_shares_are_set(open_kb, few):
    open_kb(**ANYTHING).calibrate(few)
    base = open_kb()
    assert base.calibration().result.recipe == CHEAPEST
    assert base.ask(QUESTIONS[0]).plan.recipe == CHEAPEST


def test_an_open_conversation_keeps_answers_under_its_own_recipe(open_kb, few):
    base = open_kb(**ANYTHING, answer_limit_bytes=10**7)
    with base.conversation() as talk:
        opened = talk.settings.options
        base.calibrate(few)
        assert "".join(base.send(talk, QUESTIONS[0]))
    ((question, kept),) = base.answers.most_used()
    assert (question, kept.cache_key()) == (QUESTIONS[0], opened.cache_key())


def test_documents_are_listed_under_another_instruction(open_kb):
    base = open_kb(system="Answer in Latin.")
    assert base.documents()
    found = base.calibration()
    assert found.result is None
    assert "was made with" in found.summary


def test_it_stays_until_it_is_made_again_and_is_due_once_many_documents_have_changed(
    open_kb, few, tmp_path, monkeypatch
):
    base = open_kb(**ANYTHING)
    base.calibrate(few)
    new = tmp_path / "new.txt"
    new.write_text("Another note, of one part.")
    base.add(new)
    found = base.calibration()
    assert found.result.recipe == CHEAPEST
    assert found.note == "14% of the chunks have changed since"
    assert not found.needed
    base.remove(tmp_path / "notes" / "0.txt")
    found = base.calibration()
    assert found.result.recipe == CHEAPEST
    assert found.note == "43% of the chunks have changed since; run `kvweave calibrate`"
    assert found.needed
    assert base.ask(QUESTIONS[0]).plan.recipe == CHEAPEST
    monkeypatch.setattr("kvweave.state.calibration_results.__version__", "99")
    assert "for kvweave" in base.calibration().note
    base.remove_all()
    assert "not calibrated" in base.calibration().note


def test_changed_documents_void_what_is_measured(open_kb, tmp_path):
    base = open_kb(recipe="prefix")
    table, conditions = base.state.calibrations, base.auto.conditions()
    table.add_measured(conditions, "When?", calibration_results.MeasuredQuestion({}, 1.0, 1.0))
    assert table.measured(conditions)
    left = base.folder / "calibration"  # by a killed process
    left.mkdir()
    base.remove(tmp_path / "notes" / "0.txt")
    assert not table.measured(conditions)
    assert not left.exists()


# At idle time


def test_idle_time_calibrates_once_enough_questions_are_known(open_kb, few, monkeypatch):
    monkeypatch.setattr(QuestionPredictor, "reply", lambda *given, **named: "")
    monkeypatch.setattr(
        jobs, "_fault", lambda *given: None
    )  # the tiny model's answers are not in the documents
    base = open_kb(**ANYTHING, answer_limit_bytes=10**7)
    vector = base.encoder.encode(["x"])[0]
    for question in few[:3]:
        base.ask(question)
    assert "calibration" not in base.idle().jobs
    base.predictions.predicted.add(few[3], "knowledge", [])
    base.answers.add_predicted(few[3], vector, base._settings.options())
    report = base.idle()
    assert report.jobs["calibration"] == 6  # four questions, one batch of chunks, the verdict
    verdict = base.calibration().result
    assert (verdict.recipe, verdict.asked, verdict.predicted) == (CHEAPEST, 3, 1)
    assert report.jobs["answers"] == 3
    for question in (few[0], few[3]):  # asked and predicted: computed ahead by the recipe that now answers
        assert base.ask(question).plan.cache_hit is not None
    assert "calibration" not in base.idle().jobs
    assert not (base.folder / "calibration").exists()


# The name


def test_auto_is_a_name_wherever_a_recipe_is_taken(tiny):
    from kvweave.kvstore.memory_store import MemoryStore
    from kvweave.testing import tiny_adapter

    assert recipe_named("auto").name == "weave-shifted"
    assert recipe_named("similar+auto").name == "similar+weave-shifted"
    prompt = Prompt("Where?", ("A river is here.", "Another one is there."))
    assert (
        kvweave.prefill(tiny_adapter(), MemoryStore(), prompt, recipe="auto").plan.recipe == "weave-shifted"
    )
