"""Background work through the public interface: what it computes ahead, when it stops, and that it yields to requests."""

import signal
import threading
import time

import pytest

from kvweave.answer_cache.cache import AnswerCache
from kvweave.background.precompute import Precomputer
from kvweave.background.prediction import QuestionPredictor
from kvweave.files import try_lock
from kvweave.results import Answer, Plan, Timing
from kvweave.state.active_requests import ActiveRequests
from kvweave.testing import tiny_model, tiny_tokenizer
from support.processes import Program, run_program

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")

GLORRIC = "What is the password of Glorric?"
AGAIN = "The password of Glorric?"
SENDBEL = "What is the password of Sendbel?"
NEWS = "What is the password of Glorric? The password of Glorric is needle."


@pytest.fixture
def base(open_kb, documents):
    """A knowledge base with three documents and an answer cache."""
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any")
    kb.add(documents)
    return kb


@pytest.fixture
def predicted(monkeypatch):
    """The model's replies to prediction requests, in order, as a test sets them; summaries repeat their text."""
    replies = []

    def say(self, notes, request, draw):
        if "key content" in request.text:
            return " ".join(notes)
        return replies.pop(0) if replies else ""

    monkeypatch.setattr(QuestionPredictor, "reply", say)
    return replies


def is_cached(answer):
    return answer.plan.cache_hit is not None


def kept(base):
    return base.predictions.predicted.totals().kept


# Pending questions


def test_a_question_whose_answer_is_empty_is_computed_once(base, predicted, monkeypatch):
    base.ask(GLORRIC)
    base.ask(AGAIN)
    computed = []

    def nothing(self, text, answer_settings, accepts=None):
        computed.append(text)
        return Answer("", (), Plan("reuse", 0.0, ()), Timing())

    monkeypatch.setattr(Precomputer, "answer", nothing)
    base.idle()
    base.idle()
    assert computed == [AGAIN]
    assert base.answers.pending() == []
    assert base.ask(AGAIN).plan.cache_hit.question == GLORRIC


def test_a_question_that_got_the_answer_of_another_gets_its_own(base, predicted):
    base.ask(GLORRIC)
    base.ask(AGAIN)
    report = base.idle()
    assert report.jobs["answers"] == 1
    assert report.flops > 0
    assert base.answers.pending() == []
    assert base.ask(AGAIN).plan.cache_hit.question == AGAIN


def test_answers_invalidated_by_documents_are_computed_again(base, documents, predicted):
    base.ask(GLORRIC, top_k=1)
    base.ask("What did the guest order?", top_k=1)
    (documents / "news.txt").write_text(NEWS)
    base.add(documents)
    base.idle()
    answer = base.ask(GLORRIC, top_k=1)
    assert is_cached(answer)
    assert answer.text == "needle"
    assert is_cached(base.ask("What did the guest order?", top_k=1))


def test_answers_deleted_with_a_changed_document_are_computed_again(base, documents, predicted):
    base.ask(GLORRIC)
    (documents / "passwords.md").write_text("The password of Glorric is needle.")
    base.add(documents)
    base.idle()
    answer = base.ask(GLORRIC)
    assert is_cached(answer)
    assert answer.text == "needle"


# Prediction


def test_predicted_questions_are_answered_before_they_are_asked(base, predicted):
    predicted += [SENDBEL]
    base.idle()
    assert kept(base) == 1
    answer = base.ask(SENDBEL)
    assert is_cached(answer)
    assert answer.text == base.ask(SENDBEL, cache="off").text
    totals = base.predictions.predicted.totals()
    assert (totals.predicted, totals.served, totals.given) == ({"knowledge": 1}, 1, 1)


def test_precomputed_answers_are_decoded_under_the_settings(open_kb, documents, predicted, monkeypatch):
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", kv_budget=1.0, resident_bytes=20_000_000)
    kb.add(documents)
    predicted.append(GLORRIC)
    answered, plain = [], Precomputer.answer
    monkeypatch.setattr(Precomputer, "answer", lambda *given: answered.append(plain(*given)) or answered[-1])
    kb.idle()
    (ahead,) = answered
    assert 0 < ahead.decoding.resident_bytes <= 20_000_000
    assert is_cached(kb.ask(GLORRIC))


def test_known_similar_unanswerable_and_time_sensitive_predictions_are_dropped(base, predicted):
    base.ask(GLORRIC)
    predicted += [
        GLORRIC,
        AGAIN,
        "What is the password of Zebulon?",
        "What is the password of Sendbel today?",
        f"1. {SENDBEL}",
        "The password of Sendbel?",
    ]
    base.idle()
    totals = base.predictions.predicted.totals()
    assert (totals.kept, totals.dropped) == (1, 1)
    assert is_cached(base.ask(SENDBEL))
    assert not base.predictions.predicted.contains(GLORRIC)


def test_a_predicted_question_without_an_answer_is_dropped(base, predicted, monkeypatch):
    predicted += [SENDBEL]
    monkeypatch.setattr("kvweave.background.jobs.is_non_answer", lambda answer: "lantern" in answer)
    base.idle()
    totals = base.predictions.predicted.totals()
    assert (totals.kept, totals.dropped) == (0, 1)
    assert base.answers.totals().questions == 0


def test_an_answer_that_the_chunks_do_not_support_is_dropped(base, predicted, monkeypatch):
    predicted += [SENDBEL]
    monkeypatch.setattr("kvweave.background.jobs.is_supported", lambda *given: False)
    base.idle()
    assert base.predictions.predicted.totals().reasons == {"unsupported": 1}
    assert base.answers.totals().questions == 0
    assert not is_cached(base.ask(SENDBEL))


def test_an_answer_that_is_not_supported_is_never_stored(base, predicted, monkeypatch):
    """Not even for the moment until it is dropped: a process may be killed in between."""
    predicted += [SENDBEL]
    stored, put = [], AnswerCache.put
    monkeypatch.setattr(
        AnswerCache, "put", lambda *given, **named: stored.append(given[1]) or put(*given, **named)
    )
    monkeypatch.setattr("kvweave.background.jobs.is_supported", lambda *given: False)
    base.idle()
    assert not stored
    base.ask(GLORRIC)
    assert stored == [GLORRIC]


def test_a_summary_that_goes_round_in_circles_is_counted_and_not_predicted_from(base, monkeypatch):
    read = []

    def say(self, notes, request, draw):
        if "key content" in request.text:
            return "password " * 100
        read.append(notes)
        return ""

    monkeypatch.setattr(QuestionPredictor, "reply", say)
    base.idle()
    status = base.idle_status()
    assert status.summaries_dropped["repetition"] > 0
    assert read
    assert not any("password password" in note for notes in read for note in notes)
    assert any("Glorric" in note for notes in read for note in notes)


def test_a_round_predicts_at_most_the_stride(open_kb, documents, predicted):
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", prediction_stride=2)
    kb.add(documents)
    told = []
    names = [word for word in (documents / "passwords.md").read_text().split() if word[0].isupper()]
    predicted += [f"What is the password of {name}?" for name in dict.fromkeys(names) if name != "The"]
    put = kb.predictions.summary.record_round
    kb.predictions.summary.record_round = lambda part: told.append(kept(kb)) or put(part)
    kb.idle()
    assert len(told) >= 2
    assert all(later - earlier <= 2 for earlier, later in zip([0, *told], [*told, kept(kb)], strict=False))


def test_new_questions_lead_to_one_round_of_predictions_like_them(base, monkeypatch):
    asked = []

    def say(self, notes, request, draw):
        if "key content" in request.text:
            return " ".join(notes)
        asked.append((notes, request.text))
        return ""

    monkeypatch.setattr(QuestionPredictor, "reply", say)
    base.ask(GLORRIC)
    base.ask(SENDBEL)
    base.idle()
    stride = base.config.prediction.prediction_stride
    ones = [request for _, request in asked if "Earlier questions" in request]
    assert len(ones) == stride
    assert set(ones) == {f"Earlier questions: {GLORRIC} {SENDBEL} Which question could be next?"}
    assert all(notes for notes, _ in asked)
    asked.clear()
    base.idle()
    assert asked == []
    base.ask("What did the guest order?", cache="off")
    base.idle()
    assert asked == []
    base.ask("What did the guest order?")
    base.idle()
    assert len(asked) == stride


def test_removing_a_document_deletes_predictions_from_it(base, documents, predicted):
    predicted += [SENDBEL]
    base.idle()
    assert kept(base) == 1
    base.remove(documents / "passwords.md")
    assert kept(base) == 0
    assert base.answers.totals().questions == 0
    assert all("Sendbel" not in part.text for part in base.predictions.summary.parts())
    base.idle()
    assert not base.predictions.predicted.contains(SENDBEL)


def test_a_predicted_question_that_a_user_asked_stays(base, documents, predicted):
    predicted += [SENDBEL]
    base.idle()
    base.ask(SENDBEL)
    base.remove(documents / "passwords.md")
    assert [waiting.question for waiting in base.answers.pending()] == [SENDBEL]


def test_a_prediction_from_a_document_that_is_removed_meanwhile_is_discarded(base, documents, monkeypatch):
    def say(self, notes, request, draw):
        if "key content" in request.text:
            return " ".join(notes)
        if (documents / "passwords.md").exists():
            (documents / "passwords.md").unlink()
            base.remove(documents / "passwords.md")
        return SENDBEL

    monkeypatch.setattr(QuestionPredictor, "reply", say)
    base.idle()
    assert kept(base) == 0
    assert base.answers.totals().questions == 0


def test_the_reference_model_answers_its_predicted_questions_as_it_would_when_asked(open_kb, documents):
    base = open_kb(answer_limit_bytes=10**7, idle_power="any", prediction_stride=2)
    base.add(documents / "passwords.md")
    report = base.idle()
    assert report.ended == "nothing is left to do"
    assert report.jobs["abstract"] >= 1
    assert report.jobs["population"] == kept(base) >= 1
    again = base.idle()
    assert again.jobs == {}
    assert again.flops == 0
    for question, answer_settings in base.answers.most_used():
        assert base.ask(question).text == base.ask(question, cache="off").text
        assert answer_settings.recipe == RECIPE


def test_another_model_gets_instructions_and_its_replies_do_no_harm(open_kb, documents, tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    chat = "{% for each in messages %}{{ each.content }}\n{% endfor %}"
    tiny_tokenizer(chat).save_pretrained(folder)
    kb = open_kb(model=str(folder), chunk_tokens=48, answer_limit_bytes=10**7, idle_power="any")
    kb.add(documents / "passwords.md")
    kb.ask(GLORRIC)
    report = kb.idle()
    assert report.ended == "nothing is left to do"
    assert report.jobs["abstract"] > 1
    assert report.flops > 0
    listed = {chunk for (chunk,) in kb.state.database.query("SELECT row_id FROM document_chunks")}
    covered = {chunk for (chunk,) in kb.state.database.query("SELECT chunk FROM abstract_chunks")}
    assert covered == listed
    assert kb.idle().jobs == {}


# The scheduler


def test_above_the_cutoff_only_kv_is_computed_and_up_to_it_the_answer_too(open_kb, documents, predicted):
    settings = {"answer_limit_bytes": 10**7, "idle_power": "any", "recipe": "prefix"}
    high = open_kb(answer_threshold=0.9, **settings)
    high.add(documents)
    predicted += [SENDBEL]
    report = high.idle()
    assert report.jobs["population"] == 1
    assert [(one.question, one.reason) for one in high.answers.pending()] == [(SENDBEL, "prefilled")]
    assert high.idle().jobs == {}
    low = open_kb(answer_threshold=high.config.prediction.decode_cutoff, **settings)
    converted = low.idle()
    assert converted.jobs == {"conversion": 1}
    assert (
        0 < converted.flops < high.background_budget.totals()["population"].flops
    )  # its prompt is not computed again
    answer = low.ask(SENDBEL)
    assert is_cached(answer)
    assert answer.text == low.ask(SENDBEL, cache="off").text


def test_after_prefilling_ahead_only_the_question_is_computed(open_kb, documents, predicted):
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", recipe="prefix", answer_threshold=0.9)
    kb.add(documents)
    predicted += [SENDBEL]
    kb.idle()
    plan = kb.ask(SENDBEL).plan
    assert plan.cache_hit is None
    assert plan.fresh_tokens == plan.spans[-1].tokens


def test_evicted_kv_is_restored_only_when_the_limit_rises(open_kb, documents, predicted):
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", recipe="prefix")
    kb.add(documents)
    kb.ask(SENDBEL)
    held = kb.store.used_bytes
    assert kb.idle().ended == "nothing is left to do"
    kb.store.set_limit(held // 2)
    kb.idle()
    assert kb.store.used_bytes <= held // 2
    assert "restoration" not in kb.idle().jobs
    kb.store.set_limit(10 * held)
    assert kb.idle().jobs["restoration"] == 1
    plan = kb.ask(SENDBEL, cache="refresh").plan
    assert plan.fresh_tokens == plan.spans[-1].tokens
    assert "restoration" not in kb.idle().jobs


def test_prepared_chunk_kv_is_restored_too(open_kb, documents, predicted):
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any")
    kb.add(documents)
    kb.ask(SENDBEL)
    kb.idle()
    held = kb.store.used_bytes
    kb.store.set_limit(0)
    kb.idle()
    assert kb.ask(SENDBEL, cache="refresh").plan.reused_tokens == 0
    kb.store.set_limit(10 * held)
    kb.idle()
    plan = kb.ask(SENDBEL, cache="refresh").plan
    assert plan.fresh_tokens == plan.spans[-1].tokens


# Budgets and power


def test_a_budget_of_seconds_ends_the_work(open_kb, documents, predicted):
    predicted += [SENDBEL]
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", idle_seconds_per_day=1e-6)
    kb.add(documents)
    kb.ask(GLORRIC)
    kb.ask(AGAIN)
    kb.ask("Glorric password")
    assert len(kb.answers.pending()) == 2
    report = kb.idle()
    assert report.jobs == {"answers": 1}  # the one that had started
    assert "idle_seconds_per_day" in report.ended
    assert kb.idle().jobs == {}


def test_on_battery_nothing_runs_unless_allowed(open_kb, documents, predicted, monkeypatch):
    class Battery:
        power_plugged = False

    monkeypatch.setattr("kvweave.background.conditions.psutil.sensors_battery", Battery, raising=False)
    saving = open_kb(answer_limit_bytes=10**7)
    saving.add(documents)
    saving.ask(GLORRIC)
    saving.ask(AGAIN)
    report = saving.idle()
    assert report.jobs == {}
    assert "battery" in report.ended
    spending = open_kb(answer_limit_bytes=10**7, idle_power="any")
    assert spending.idle().jobs["answers"] == 1


def test_a_failed_job_is_logged_and_retried_in_another_run(base, predicted, monkeypatch, caplog):
    base.ask(GLORRIC)
    base.ask(AGAIN)
    from kvweave.errors import StoreBusy

    with monkeypatch.context() as patch:

        def fail(*args, **kwargs):
            raise StoreBusy("locked")

        patch.setattr(Precomputer, "answer", fail)
        assert base.idle().jobs.get("answers", 0) == 0
    assert "background work left undone" in caplog.text
    assert base.idle().jobs["answers"] == 1


def test_a_knowledge_base_without_documents_has_nothing_to_do(open_kb):
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any")
    assert kb.idle().ended == "nothing is left to do"


def test_no_model_is_loaded_when_nothing_is_left(base, open_kb, predicted, monkeypatch):
    base.ask(GLORRIC)
    base.idle()
    base.close()
    again = open_kb(answer_limit_bytes=10**7, idle_power="any")

    def refuse(*args, **kwargs):
        raise AssertionError("was loaded")

    monkeypatch.setattr("kvweave.models.loading.load_any_model", refuse)
    monkeypatch.setattr("kvweave.embedding.TextEncoder.load", refuse)
    assert again.idle().ended == "nothing is left to do"
    again.store.set_limit(again.store.limit_bytes // 2)
    assert again.idle().ended == "nothing is left to do"


# Yielding to requests


def test_nothing_runs_during_a_request_and_work_resumes_after_it(base, predicted):
    base.ask(GLORRIC)
    base.ask(AGAIN)
    elsewhere = ActiveRequests(base.folder / "requests.lock")  # as another process sees it
    arrival = elsewhere.start()
    reports = []
    working = threading.Thread(target=lambda: reports.append(base.idle()))
    working.start()
    time.sleep(0.5)
    assert len(base.answers.pending()) == 1
    arrival.close()
    working.join(timeout=60)
    assert reports[0].jobs["answers"] == 1
    assert base.answers.pending() == []


def test_a_request_during_work_is_served_before_the_work_resumes(base, predicted, monkeypatch):
    base.ask(GLORRIC)
    base.ask(AGAIN)
    served = []
    began = threading.Event()
    check = ActiveRequests.any_active.fget

    def noticing(self):
        began.set()
        return check(self)

    monkeypatch.setattr(ActiveRequests, "any_active", property(noticing))
    working = threading.Thread(target=base.idle)
    working.start()
    began.wait(timeout=60)
    served.append(base.ask("What did the guest order?").text)
    working.join(timeout=60)
    assert served == [base.ask("What did the guest order?", cache="off").text]
    assert base.answers.pending() == []


def test_a_request_is_active_from_its_start_to_its_last_piece_or_its_failure(base):
    seen = ActiveRequests(base.folder / "requests.lock")
    assert not seen.any_active
    stream = base.stream(GLORRIC)
    assert seen.any_active
    pieces = iter(stream)
    next(pieces)
    assert seen.any_active
    "".join(pieces)
    assert not seen.any_active
    with pytest.raises(ValueError, match="empty"):
        base.ask("  ")
    assert not seen.any_active
    closed = iter(base.stream(SENDBEL))
    next(closed)
    closed.close()
    assert not seen.any_active
    assert 0 <= seen.idle_s < 60


def test_an_unwritable_folder_does_not_prevent_requests(tmp_path):
    nowhere = ActiveRequests(tmp_path / "missing" / "requests.lock")
    with nowhere.start():
        assert not nowhere.any_active
    assert nowhere.idle_s == float("inf")


def test_a_killed_process_is_no_active_request(base):
    code = (
        "import sys, time; from pathlib import Path; from kvweave.state.active_requests import ActiveRequests\n"
        f"held = ActiveRequests(Path({str(base.folder / 'requests.lock')!r})).start(); print('here', flush=True); time.sleep(60)"
    )
    with Program(["-c", code]) as other:
        assert other.stdout.readline() == "here\n"
        seen = ActiveRequests(base.folder / "requests.lock")
        assert seen.any_active
        other.kill()
        other.wait()
    assert not seen.any_active


def test_one_process_works_at_a_time(base, predicted):
    base.ask(GLORRIC)
    base.ask(AGAIN)
    with try_lock(base.folder / "idle.lock") as here:
        assert here
        report = base.idle()
    assert report.jobs == {}
    assert "another process" in report.ended
    assert base.idle().jobs["answers"] == 1


def test_watching_waits_for_idle_time_and_ends_when_stopped(open_kb, documents, predicted):
    kb = open_kb(answer_limit_bytes=10**7, idle_power="any", idle_quiet_s=0.5)
    kb.add(documents)
    kb.ask(GLORRIC)
    kb.ask(AGAIN)
    asked = time.monotonic()
    stop = threading.Event()
    watching = threading.Thread(target=kb.watch_idle, args=(stop,))
    watching.start()
    while kb.answers.pending() and time.monotonic() - asked < 60:
        time.sleep(0.05)
    answered = time.monotonic()
    stop.set()
    watching.join(timeout=30)
    assert not watching.is_alive()
    assert kb.answers.pending() == []
    assert answered - asked >= 0.5


def test_a_killed_run_is_resumed(base, predicted, tmp_path):
    base.ask(GLORRIC)
    base.ask(AGAIN)
    base.ask("Glorric password")
    assert len(base.answers.pending()) == 2
    code = (
        "import os, signal, kvweave\n"
        f"kb = kvweave.open('notes', home={str(tmp_path / 'home')!r}, answer_limit_bytes=10**7, idle_power='any')\n"
        "def report(stage, done, total):\n"
        "    if done: os.kill(os.getpid(), signal.SIGKILL)\n"
        "kb.idle(report)\n"
    )
    killed = run_program(["-c", code], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert len(base.answers.pending()) == 1
    base.idle()
    assert base.answers.pending() == []
    assert base.store.verify().sound
