"""One user under one system: exact answers stay exact, caches hold what the system defines, background work follows its protocol."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from kvweave.answering.generation import Decoded, generate
from kvweave.background import prediction as question_prediction
from kvweave.background.prompts import InstructPrompts
from kvweave.config import GenerationConfig
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import remember, run
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.personas import background
from kvweave_lab.eval.personas import run as personas_run
from kvweave_lab.eval.personas.background import BackgroundRunner
from kvweave_lab.eval.personas.corpus import UserCorpus
from kvweave_lab.eval.personas.model import MemoizedModel, ModelPass, Reply
from kvweave_lab.eval.personas.pricing import Shape
from kvweave_lab.eval.personas.run import parse_session
from kvweave_lab.eval.personas.session import UserSession
from kvweave_lab.eval.personas.systems import (
    MEANCACHE,
    NO_CACHE,
    OURS,
    PERCACHE,
    RAGCACHE,
    RAGCACHE_SLEEP_TIME,
    SLEEP_TIME,
    SYSTEMS,
    Setting,
    Trial,
    budget_trial,
    comparison,
    system_trial,
)
from kvweave_lab.results_log import ResultsLog
from lab_support.personas import ANN, BEN, USER, Words, rows_of_passes


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def shape(adapter):
    return Shape.of(adapter)


@pytest.fixture
def corpus(adapter, shape):
    reader, recipe = MemoizedModel(adapter), recipe_named("reuse")
    made = UserCorpus(USER, reader, Words(), recipe, shape.cost, chunk_tokens=40, top_k=3)
    with made:
        yield made


def predicting(monkeypatch, *questions):
    """Let the model predict these questions in turn, and summarise everything to one sentence."""
    left = list(questions)

    def generate(self, notes, request, draw, system):
        if "key facts" in request.text:
            return Reply("The code of Ann is 12.", ModelPass(10, decoded=1))
        left.append(left.pop(0))
        return Reply(left[-1], ModelPass(20, decoded=2))

    monkeypatch.setattr(MemoizedModel, "generate", generate)
    for module in (question_prediction, background):
        monkeypatch.setattr(module, "prompts_for", lambda model, chat: InstructPrompts())


def plainly(adapter, prompt):
    """Return full attention's answer, as `kvweave ask --recipe full` gives it."""
    result = run(recipe_named("full"), adapter, MemoryStore(), prompt)
    decoded = Decoded()
    given = (prompt.token_ids, result.logits, GenerationConfig(), 32)
    list(generate(adapter, result.kv_cache, *given, decoded, form=prompt.reply))
    return decoded.text.strip(), decoded.tokens


class TestMemoizedModel:
    def test_exact_reuse_answers_as_full_attention(self, adapter, corpus):
        store = MemoryStore()
        for question in (ANN, BEN, ANN):
            prompt = corpus.prompt(question)
            read = corpus.model.answer(recipe_named("prefix"), store, prompt, store_kv=True)
            assert (read.text, read.model_pass.decoded) == plainly(adapter, prompt)

    def test_it_finds_and_stores_the_kv_of_a_separate_pass(self, adapter, corpus):
        ours, own, recipe = MemoryStore(), MemoryStore(), recipe_named("prefix")
        for question in (ANN, BEN, ANN):
            prompt = corpus.prompt(question)
            read = corpus.model.answer(recipe, ours, prompt, store_kv=True)
            result = run(recipe, adapter, own, prompt)
            remember(result)
            exact = sum(span.tokens for span in result.plan.spans if span.origin == "exact")
            assert (read.model_pass.prompt, read.model_pass.exact, read.model_pass.stale) == (
                prompt.tokens,
                exact,
                0,
            )
            assert ours.used_bytes == own.used_bytes
            for kept in result.new_entries:
                (found,) = ours.find(adapter.fingerprint, [(kept.content.token_ids, [kept.provenance])])
                torch.testing.assert_close(found[0].kv, kept.content.kv)

    @pytest.mark.parametrize("name", ["prefix", "reuse"])
    @pytest.mark.parametrize("ends", [False, True])
    def test_drafts_are_counted_as_speculative_decoding_verifies_them(
        self, adapter, corpus, name, ends, monkeypatch
    ):
        recipe, prompt = recipe_named(name), corpus.prompt(BEN)
        if ends:  # within a draft
            result = run(recipe, adapter, MemoryStore(corpus.prepared), prompt)
            whole = Decoded()
            list(
                generate(
                    adapter, result.kv_cache, prompt.token_ids, result.logits, GenerationConfig(), 32, whole
                )
            )
            monkeypatch.setattr(adapter.model.generation_config, "eos_token_id", [whole.ids[5]])
        plain = corpus.model.answer(recipe, MemoryStore(corpus.prepared), prompt, store_kv=False)
        result = run(recipe, adapter, MemoryStore(corpus.prepared), prompt)
        decoded = Decoded()
        generation = (prompt.token_ids, result.logits, GenerationConfig(), 32)
        list(generate(adapter, result.kv_cache, *generation, decoded))
        ids = decoded.ids
        read = corpus.model.answer(
            recipe, MemoryStore(corpus.prepared), prompt, store_kv=False, looks_up=True
        )
        assert (read.text, read.model_pass.decoded) == (plain.text, plain.model_pass.decoded)
        again, own = Decoded(), run(recipe, adapter, MemoryStore(corpus.prepared), prompt)
        given = (prompt.token_ids, own.logits, GenerationConfig(), 32)
        with rows_of_passes(adapter) as passes:
            list(generate(adapter, own.kv_cache, *given, again, drafts=[]))
        assert again.ids == ids
        assert read.model_pass.accepted_draft_tokens == again.accepted_draft_tokens
        assert [rows for rows in passes if rows > 1] == list(read.model_pass.draft_passes)
        singly = (
            read.model_pass.decoded - read.model_pass.draft_pass_tokens - (not ends)
        )  # at the limit, the last token is not fed back
        assert len(passes) == singly + len(read.model_pass.draft_passes)

    def test_a_long_reply_begins_with_the_answer_and_costs_its_length(self, corpus):
        recipe, prompt = recipe_named("prefix"), corpus.prompt(ANN)
        short = corpus.model.answer(recipe, MemoryStore(), prompt, store_kv=False, looks_up=True)
        replies = [
            corpus.model.answer(recipe, MemoryStore(), prompt, store_kv=False, looks_up=True, long=True)
            for _ in range(2)
        ]
        assert replies[0] == replies[1]
        reply = replies[0]
        assert 60 <= reply.model_pass.decoded <= 150
        assert corpus.model.long_replies.short(reply.text) == short.text
        assert reply.model_pass.rows == short.model_pass.rows
        assert reply.model_pass.accepted_draft_tokens > 0  # it quotes the chunks

    def test_without_store_kv_the_store_does_not_change(self, corpus):
        store = MemoryStore()
        corpus.model.answer(recipe_named("prefix"), store, corpus.prompt(ANN), store_kv=False)
        assert store.used_bytes == 0

    def test_over_stale_kv_the_answer_is_the_recipes(self, adapter, corpus):
        recipe = recipe_named("reuse")
        prompt = corpus.prompt(ANN)
        read = corpus.model.answer(recipe, MemoryStore(corpus.prepared), prompt, store_kv=True)
        result = run(recipe, adapter, MemoryStore(corpus.prepared), prompt)
        origins = {span.origin: span.tokens for span in result.plan.spans}
        assert read.model_pass.stale == sum(
            span.tokens for span in result.plan.spans if span.origin == "reused"
        )
        assert read.model_pass.stale > 0, origins
        assert read.found == read.context > 0

    def test_prefill_stores_kv_and_decodes_nothing(self, corpus):
        store = MemoryStore()
        read = corpus.model.prefill(recipe_named("prefix"), store, corpus.prompt(ANN))
        assert (read.text, read.model_pass.decoded) == ("", 0)
        again = corpus.model.answer(recipe_named("prefix"), store, corpus.prompt(ANN), store_kv=True)
        assert again.found == again.context


class TestCaches:
    @pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
    def test_a_question_fills_the_caches_that_the_system_defines(self, corpus, system):
        with UserSession(system, Setting(), corpus) as session:
            before = session.stored().kv_tokens
            session.ask(USER.questions[0])
            held = session.stored()
            assert (held.answered == 1) == ("asked" in system.fills_answers)
            if system.kv != "anywhere":
                assert (held.kv_tokens > before) == ("asked" in system.fills_kv)

    def test_near_matching_shares_answers_of_different_questions(self, corpus):
        near = Setting(threshold=0.7)
        with UserSession(MEANCACHE, near, corpus) as session:
            first = session.ask(USER.questions[0])
            second = session.ask(USER.questions[1])
        assert second.cached_question == first.question
        assert second.answer == first.answer
        assert second.is_reworded_hit
        assert second.similarity >= 0.7

    def test_kvweave_shares_no_answer_of_a_different_question(self, corpus):
        with UserSession(OURS, Setting(threshold=0.0), corpus) as session:
            session.ask(USER.questions[0])
            assert session.ask(USER.questions[1]).cached_question is None
            again = session.ask(USER.questions[0])
        assert again.cached_question == again.question == ANN
        assert not again.is_reworded_hit

    def test_the_same_chunks_in_the_same_order_are_reused(self, corpus):
        with UserSession(RAGCACHE, Setting(), corpus) as session:
            first, again = session.ask(USER.questions[0]), session.ask(USER.questions[0])
        assert (first.found, again.found) == (0, again.context)
        assert again.answer == first.answer

    def test_kv_of_users_and_of_preparation_does_not_count_as_predicted(self, corpus):
        with UserSession(RAGCACHE, Setting(), corpus) as session:
            session.ask(USER.questions[0])
            again = session.ask(USER.questions[0])
        with UserSession(OURS, Setting(), corpus) as session:
            prepared = session.ask(USER.questions[0])
        for served in (again, prepared):
            assert served.found > 0
            assert served.found_predicted == 0


class TestIdleTime:
    def run_once(self, session, shape, budget=None):
        idle = BackgroundRunner(session, shape)
        return idle, idle.run(budget, first=True)

    def test_percache_fills_both_caches_ahead_and_serves_from_them(self, corpus, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        with UserSession(PERCACHE, Setting(stride=1), corpus) as session:
            _, period = self.run_once(session, shape)
            assert period.steps["population"] == 1
            held = session.stored()
            assert (held.answered, held.predicted) == (1, 1)
            assert held.kv_tokens > 0
            served = session.ask(USER.questions[0])
        assert served.was_predicted
        assert served.model_pass is None

    def test_kv_of_predicted_questions_is_counted_separately(self, corpus, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        for threshold in (0.9, 0.85):  # above the cutoff it is only prefilled
            with UserSession(PERCACHE, Setting(threshold=threshold, stride=1), corpus) as session:
                self.run_once(session, shape)
                session.answers.clear()
                asked = session.ask(USER.questions[0])
            assert asked.found_predicted == asked.found == asked.context > 0

    @pytest.mark.parametrize("system", [SLEEP_TIME, RAGCACHE_SLEEP_TIME], ids=lambda system: system.name)
    def test_sleep_time_fills_only_answers(self, corpus, shape, monkeypatch, system):
        predicting(monkeypatch, ANN)
        with UserSession(system, Setting(stride=1), corpus) as session:
            self.run_once(session, shape)
            assert (session.stored().answered, session.stored().kv_tokens) == (1, 0)

    def test_systems_without_prediction_do_nothing_at_idle_time(self, corpus, shape):
        for system in (NO_CACHE, RAGCACHE, MEANCACHE):
            with UserSession(system, Setting(), corpus) as session:
                assert self.run_once(session, shape)[1].steps == {}

    def test_two_rounds_run_before_the_first_question_and_one_after_each(self, corpus, shape, monkeypatch):
        predicting(monkeypatch, ANN, BEN)
        with UserSession(PERCACHE, Setting(stride=3), corpus) as session:
            idle, period = self.run_once(session, shape)
            batches = len(session.predictions.summary.parts())
            assert period.steps["prediction"] == batches + 2 * 3
            session.ask(USER.questions[2])
            assert idle.run(None, first=False).steps["prediction"] == 3
            assert "prediction" not in idle.run(None, first=False).steps

    def test_above_the_cutoff_only_kv_is_precomputed_until_the_threshold_falls(
        self, corpus, shape, monkeypatch
    ):
        predicting(monkeypatch, ANN)
        with UserSession(PERCACHE, Setting(threshold=0.9, stride=1), corpus) as session:
            idle, _ = self.run_once(session, shape)
            assert (session.stored().answered, session.stored().kv_tokens > 0) == (0, True)
            session.change(Setting(threshold=0.85, stride=1))
            assert idle.run(None, first=False).steps == {"conversion": 1}
            assert session.stored().answered == 1

    def test_without_the_scheduler_answers_are_precomputed_at_once(self, corpus, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        setting = Setting(threshold=0.9, stride=1, schedules=False)
        with UserSession(PERCACHE, setting, corpus) as session:
            self.run_once(session, shape)
            assert session.stored().answered == 1

    def test_evicted_kv_is_restored_when_the_limit_rises(self, corpus, shape, monkeypatch):
        predicting(monkeypatch, ANN, BEN, "What is the cat of Cleo?", "What is the hat of Eve?")
        few, many = Setting(stride=2, limit_tokens=64), Setting(stride=2, limit_tokens=4096)
        with UserSession(PERCACHE, few, corpus) as session:
            idle, _ = self.run_once(session, shape)
            before = session.stored().kv_tokens
            session.change(many)
            assert idle.run(None, first=False).steps["restoration"] >= 1
            assert session.stored().kv_tokens > before
            assert "restoration" not in idle.run(None, first=False).steps

    def test_a_budget_ends_the_work_and_overspending_is_deducted_from_the_next(
        self, corpus, shape, monkeypatch
    ):
        predicting(monkeypatch, ANN, BEN)
        with UserSession(PERCACHE, Setting(stride=1), corpus) as session:
            idle, period = self.run_once(session, shape, budget=1.0)
            assert period.steps == {"prediction": 2}  # the first lays notes out, which costs nothing
            assert idle.run(period.flops - 2.0, first=False).steps == {}
            assert idle.run(None, first=False).steps

    def test_kvweave_is_charged_for_preparation(self, corpus, shape):
        rows = sum(corpus.chunk_tokens)
        with UserSession(OURS, Setting(), corpus) as session:
            period = BackgroundRunner(session, shape).run(1.0, first=True)
        assert period.steps == {"preparation": 1}
        assert period.flops >= rows * shape.cost.per_row

    def test_preparation_is_counted_at_the_priced_shape(self, adapter, shape):
        def counted(cost):
            with UserCorpus(
                USER, MemoizedModel(adapter), Words(), recipe_named("reuse"), cost, chunk_tokens=40
            ) as made:
                return made.prepared_flops

        rows = counted(replace(shape.cost, per_row=1, per_key=0, per_logits=0))
        keys = counted(replace(shape.cost, per_row=0, per_key=1, per_logits=0, windows=(None,)))
        wide = replace(shape.cost, per_row=10**6, per_key=10, per_logits=0, windows=(None,) * 24)
        assert rows > 0
        assert counted(wide) == 10**6 * rows + 10 * 24 * keys


class TestSessions:
    def open_log(self, folder):
        return ResultsLog(
            folder, {}, file="sessions.jsonl", version=1, key=lambda one: one.key, parse=parse_session
        )

    def run_trials(self, folder, adapter, shape, trials):
        with self.open_log(folder) as log:
            return personas_run.run_sessions(
                [USER], {USER.name: trials}, log, adapter, Words(), recipe_named("reuse"), shape
            )

    def test_long_replies_change_costs_and_bytes_alone(self, adapter, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        trials = [
            system_trial(RAGCACHE, "short"),
            system_trial(RAGCACHE, "long"),
            system_trial(MEANCACHE),
            system_trial(MEANCACHE, "long"),
        ]
        short, long, near, near_long = self.run_trials(None, adapter, shape, trials)
        for one, other in ((short, long), (near, near_long)):
            assert [served.answer for served in one.served] == [served.answer for served in other.served]
            assert [served.is_hit for served in one.served] == [served.is_hit for served in other.served]
        assert near_long.stored.answer_bytes > near.stored.answer_bytes
        for one, other in zip(short.served, long.served, strict=True):
            assert one.model_pass.stored_spans == other.model_pass.stored_spans
            assert one.model_pass.decoded < 60 <= other.model_pass.decoded

    def test_a_users_stored_kv_is_freed(self, adapter, shape, tmp_path, monkeypatch):
        stores = []

        class Seen(UserSession):
            def __init__(self, *given):
                super().__init__(*given)
                stores.append(weakref.ref(self.store))

        monkeypatch.setattr(personas_run, "UserSession", Seen)
        predicting(monkeypatch, ANN)
        trials = comparison()
        gc.disable()  # automatic collection depends on the number of objects, not on their size
        try:
            self.run_trials(tmp_path, adapter, shape, trials)
            assert [store() for store in stores] == [None] * len(trials)
        finally:
            gc.enable()

    def test_a_logged_session_is_not_run_again(self, adapter, shape, tmp_path, monkeypatch):
        predicting(monkeypatch, ANN)
        first = self.run_trials(tmp_path, adapter, shape, comparison())
        assert [session.trial for session in first] == [trial.key for trial in comparison()]
        assert all(len(one.served) == 3 and len(one.idle) == 4 for one in first)

        def fails(*given):
            raise AssertionError("no session is missing")

        monkeypatch.setattr(personas_run, "UserCorpus", fails)
        assert self.run_trials(tmp_path, adapter, shape, comparison()) == first

    def test_no_system_spends_more_than_percache_except_for_the_last_step(
        self, adapter, shape, tmp_path, monkeypatch
    ):
        predicting(monkeypatch, ANN, BEN)
        sessions = {one.trial: one for one in self.run_trials(None, adapter, shape, comparison())}
        budget = sum(period.flops for period in sessions[budget_trial().key].idle)
        for system in (SLEEP_TIME, RAGCACHE_SLEEP_TIME):
            spent = [period.flops for period in sessions[system_trial(system).key].idle]
            assert sum(spent) <= budget + max(spent)

    def test_settings_change_at_the_middle_question(self, adapter, shape, tmp_path):
        trial = Trial("t", "n", MEANCACHE, Setting(threshold=1.0), Setting(threshold=0.0))
        (session,) = self.run_trials(None, adapter, shape, [trial])
        assert [served.cached_question is not None for served in session.served] == [False, True, True]
