"""One user under one system: what is exact stays exact, layers hold what the system says, idle time keeps its protocol."""

import gc
import hashlib
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave.config import GenerationConfig
from kvweave.engine.generation import Decoded, generate
from kvweave.engine.speculative import PromptLookupDrafter
from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import remember, run
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.journal import LineJournal
from kvweave_lab.eval.personas import lives
from kvweave_lab.eval.personas.comparison import _session
from kvweave_lab.eval.personas.idle_time import BackgroundRunner
from kvweave_lab.eval.personas.notebook import Notebook
from kvweave_lab.eval.personas.passes import Pass
from kvweave_lab.eval.personas.people import Asked, Note, User
from kvweave_lab.eval.personas.reading import Read, Reader
from kvweave_lab.eval.personas.shape import Shape
from kvweave_lab.eval.personas.systems import (
    MEANCACHE,
    NO_CACHE,
    OURS,
    PERCACHE,
    RAGCACHE,
    RAGCACHE_SLEEP_TIME,
    SLEEP_TIME,
    SYSTEMS,
)
from kvweave_lab.eval.personas.trials import MEASURED, Setting, Trial, comparison
from kvweave_lab.eval.personas.user_session import UserSession

NOTES = tuple(
    Note(f"note-{number}.txt", text)
    for number, text in enumerate(
        (
            "The code of Ann is 12.",
            "The code of Ben is 34.",
            "The cat of Cleo is red.",
            "The dog of Dan is old.",
            "The hat of Eve is new.",
            "The car of Finn is far.",
        )
    )
)
ANN, BEN = "What is the code of Ann?", "What is the code of Ben?"
USER = User(
    "tester",
    "email",
    NOTES,
    (Asked(ANN, ("12",), "ann"), Asked(BEN, ("34",), "ben"), Asked("Which code has Ann?", ("12",), "ann")),
)


class Words:
    """Vectors of words, so that questions with words in common are near."""

    name, dimensions = "words", 16

    def encode(self, texts):
        vectors = np.full((len(texts), self.dimensions), 1e-3, dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().split():
                row[hashlib.md5(word.encode()).digest()[0] % self.dimensions] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def shape(adapter):
    return Shape.of(adapter)


@pytest.fixture
def notebook(adapter, shape):
    reader, recipe = Reader(adapter), recipe_named("reuse")
    made = Notebook(USER, reader, Words(), recipe, shape.cost, chunk_tokens=40, top_k=3)
    with made:
        yield made


def predicting(monkeypatch, *questions):
    """The model says these questions, one after the other and then again, and sums nothing up but this."""
    left = list(questions)

    def told(self, notes, request, draw, system):
        if "key content" in request or "key facts" in request:
            return Read("The code of Ann is 12.", Pass(10, decoded=1))
        left.append(left.pop(0))
        return Read(left[-1], Pass(20, decoded=2))

    monkeypatch.setattr(Reader, "told", told)


def plainly(adapter, prompt):
    """Full attention's answer, as `kvweave ask --recipe full` gives it."""
    result = run(recipe_named("full"), adapter, MemoryStore(), prompt)
    decoded = Decoded()
    list(generate(adapter, result.kv_cache, prompt.token_ids, result.logits, GenerationConfig(), 32, decoded))
    return decoded.text.strip(), decoded.tokens


@contextmanager
def rows_of_passes(adapter):
    """How many rows each call of the model has meanwhile."""
    rows = []

    def note(module, given, named):
        rows.append(named["input_ids"].shape[1])

    with adapter.model.register_forward_pre_hook(note, with_kwargs=True):
        yield rows


class TestReading:
    def test_what_is_reused_exactly_answers_as_full_attention_does(self, adapter, notebook):
        store = MemoryStore()
        for question in (ANN, BEN, ANN):
            prompt = notebook.prompt(question)
            read = notebook.reader.answer(recipe_named("prefix"), store, prompt, keeps_kv=True)
            assert (read.text, read.took.decoded) == plainly(adapter, prompt)

    def test_it_finds_and_leaves_what_a_pass_of_its_own_would(self, adapter, notebook):
        ours, own, recipe = MemoryStore(), MemoryStore(), recipe_named("prefix")
        for question in (ANN, BEN, ANN):
            prompt = notebook.prompt(question)
            read = notebook.reader.answer(recipe, ours, prompt, keeps_kv=True)
            result = run(recipe, adapter, own, prompt)
            remember(result)
            exact = sum(span.tokens for span in result.plan.spans if span.origin == "exact")
            assert (read.took.prompt, read.took.exact, read.took.stale) == (prompt.tokens, exact, 0)
            assert ours.used_bytes == own.used_bytes
            for kept in result.remembered:
                (found,) = ours.find(adapter.fingerprint, [(kept.content.token_ids, [kept.provenance])])
                torch.testing.assert_close(found[0].kv, kept.content.kv)

    @pytest.mark.parametrize("name", ["prefix", "reuse"])
    @pytest.mark.parametrize("ends", [False, True])
    def test_what_is_foretold_counts_as_the_engine_has_it_checked(
        self, adapter, notebook, name, ends, monkeypatch
    ):
        recipe, prompt = recipe_named(name), notebook.prompt(ANN)
        if ends:  # within what is told
            result = run(recipe, adapter, MemoryStore(notebook.prepared), prompt)
            whole = Decoded()
            list(
                generate(
                    adapter, result.kv_cache, prompt.token_ids, result.logits, GenerationConfig(), 32, whole
                )
            )
            monkeypatch.setattr(adapter.model.generation_config, "eos_token_id", [whole.ids[5]])
        plain = notebook.reader.answer(recipe, MemoryStore(notebook.prepared), prompt, keeps_kv=False)
        result = run(recipe, adapter, MemoryStore(notebook.prepared), prompt)
        decoded = Decoded()
        generation = (prompt.token_ids, result.logits, GenerationConfig(), 32)
        list(generate(adapter, result.kv_cache, *generation, decoded))
        ids = decoded.ids
        for drafts in ([ids], [ids[:3]], [(*ids[:2], 5, 6)], [(7, 7), ids], [(7, 7)], []):
            telling = PromptLookupDrafter(prompt.token_ids, drafts)
            read = notebook.reader.answer(
                recipe, MemoryStore(notebook.prepared), prompt, keeps_kv=False, foretelling=telling
            )
            assert (read.text, read.took.decoded) == (plain.text, plain.took.decoded)
            again, own = Decoded(), run(recipe, adapter, MemoryStore(notebook.prepared), prompt)
            given = (prompt.token_ids, own.logits, GenerationConfig(), 32)
            with rows_of_passes(adapter) as passes:
                list(generate(adapter, own.kv_cache, *given, again, drafts=drafts))
            assert again.ids == ids
            assert read.took.accepted_draft_tokens == again.accepted_draft_tokens, drafts
            assert [rows for rows in passes if rows > 1] == list(read.took.checks), drafts
            singly = (
                read.took.decoded - read.took.checked - (not ends)
            )  # at the limit the last one is not fed back
            assert len(passes) == singly + len(read.took.checks), drafts

    def test_without_keeping_the_store_stays_as_it_was(self, notebook):
        store = MemoryStore()
        notebook.reader.answer(recipe_named("prefix"), store, notebook.prompt(ANN), keeps_kv=False)
        assert store.used_bytes == 0

    def test_over_stale_kv_the_answer_is_that_of_the_recipe(self, adapter, notebook):
        recipe = recipe_named("reuse")
        prompt = notebook.prompt(ANN)
        read = notebook.reader.answer(recipe, MemoryStore(notebook.prepared), prompt, keeps_kv=True)
        result = run(recipe, adapter, MemoryStore(notebook.prepared), prompt)
        origins = {span.origin: span.tokens for span in result.plan.spans}
        assert read.took.stale == sum(span.tokens for span in result.plan.spans if span.origin == "reused")
        assert read.took.stale > 0, origins
        assert read.found == read.context > 0

    def test_prefilling_leaves_kv_and_decodes_nothing(self, notebook):
        store = MemoryStore()
        read = notebook.reader.prefill(recipe_named("prefix"), store, notebook.prompt(ANN))
        assert (read.text, read.took.decoded) == ("", 0)
        again = notebook.reader.answer(recipe_named("prefix"), store, notebook.prompt(ANN), keeps_kv=True)
        assert again.found == again.context


class TestLayers:
    @pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
    def test_a_question_leaves_what_the_system_says(self, notebook, system):
        with UserSession(system, Setting(), notebook) as session:
            before = session.held().kv_tokens
            session.ask(USER.questions[0])
            held = session.held()
            assert (held.answered == 1) == ("asked" in system.fills_answers)
            if system.kv != "anywhere":
                assert (held.kv_tokens > before) == ("asked" in system.fills_kv)

    def test_near_questions_share_an_answer_whatever_they_say(self, notebook):
        near = Setting(threshold=0.7)
        with UserSession(MEANCACHE, near, notebook) as session:
            first = session.ask(USER.questions[0])
            second = session.ask(USER.questions[1])
        assert second.cache_hit == first.question
        assert second.answer == first.answer
        assert second.other_words
        assert second.similarity >= 0.7

    def test_ours_share_none_that_reads_differently(self, notebook):
        with UserSession(OURS, Setting(threshold=0.0), notebook) as session:
            session.ask(USER.questions[0])
            assert session.ask(USER.questions[1]).cache_hit is None
            again = session.ask(USER.questions[0])
        assert again.cache_hit == again.question == ANN
        assert not again.other_words

    def test_the_same_chunks_in_the_same_order_are_found_again(self, notebook):
        with UserSession(RAGCACHE, Setting(), notebook) as session:
            first, again = session.ask(USER.questions[0]), session.ask(USER.questions[0])
        assert (first.found, again.found) == (0, again.context)
        assert again.answer == first.answer

    def test_kv_that_users_left_or_notes_came_with_is_no_work_of_predictions(self, notebook):
        with UserSession(RAGCACHE, Setting(), notebook) as session:
            session.ask(USER.questions[0])
            again = session.ask(USER.questions[0])
        with UserSession(OURS, Setting(), notebook) as session:
            prepared = session.ask(USER.questions[0])
        for served in (again, prepared):
            assert served.found > 0
            assert served.found_ahead == 0


class TestIdleTime:
    def run_once(self, session, shape, budget=None):
        idle = BackgroundRunner(session, shape)
        return idle, idle.spend(budget, first=True)

    def test_percache_fills_both_layers_ahead_and_serves_from_them(self, notebook, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        with UserSession(PERCACHE, Setting(stride=1), notebook) as session:
            _, spell = self.run_once(session, shape)
            assert spell.steps["population"] == 1
            held = session.held()
            assert (held.answered, held.predicted) == (1, 1)
            assert held.kv_tokens > 0
            served = session.ask(USER.questions[0])
        assert served.foreseen
        assert served.took is None

    def test_kv_that_a_predicted_question_left_is_told_apart(self, notebook, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        for threshold in (0.9, 0.85):  # above the cutoff it is prefilled alone
            with UserSession(PERCACHE, Setting(threshold=threshold, stride=1), notebook) as session:
                self.run_once(session, shape)
                session.answers.clear()
                asked = session.ask(USER.questions[0])
            assert asked.found_ahead == asked.found == asked.context > 0

    @pytest.mark.parametrize("system", [SLEEP_TIME, RAGCACHE_SLEEP_TIME], ids=lambda system: system.name)
    def test_sleep_time_fills_answers_only(self, notebook, shape, monkeypatch, system):
        predicting(monkeypatch, ANN)
        with UserSession(system, Setting(stride=1), notebook) as session:
            self.run_once(session, shape)
            assert (session.held().answered, session.held().kv_tokens) == (1, 0)

    def test_what_does_not_predict_does_nothing(self, notebook, shape):
        for system in (NO_CACHE, RAGCACHE, MEANCACHE):
            with UserSession(system, Setting(), notebook) as session:
                assert self.run_once(session, shape)[1].steps == {}

    def test_two_rounds_come_before_the_first_question_and_one_after_each(self, notebook, shape, monkeypatch):
        predicting(monkeypatch, ANN, BEN)
        with UserSession(PERCACHE, Setting(stride=3), notebook) as session:
            idle, spell = self.run_once(session, shape)
            batches = len(session.predictions.abstract.parts())
            assert spell.steps["prediction"] == batches + 2 * 3
            session.ask(USER.questions[2])
            assert idle.spend(None, first=False).steps["prediction"] == 3
            assert "prediction" not in idle.spend(None, first=False).steps

    def test_above_the_cutoff_there_is_kv_alone_until_the_threshold_falls(self, notebook, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        with UserSession(PERCACHE, Setting(threshold=0.9, stride=1), notebook) as session:
            idle, _ = self.run_once(session, shape)
            assert (session.held().answered, session.held().kv_tokens > 0) == (0, True)
            session.change(Setting(threshold=0.85, stride=1))
            assert idle.spend(None, first=False).steps == {"conversion": 1}
            assert session.held().answered == 1

    def test_without_the_scheduler_everything_is_decoded_at_once(self, notebook, shape, monkeypatch):
        predicting(monkeypatch, ANN)
        setting = Setting(threshold=0.9, stride=1, schedules=False)
        with UserSession(PERCACHE, setting, notebook) as session:
            self.run_once(session, shape)
            assert session.held().answered == 1

    def test_evicted_kv_comes_back_when_the_limit_rises(self, notebook, shape, monkeypatch):
        predicting(monkeypatch, ANN, BEN, "What is the cat of Cleo?", "What is the hat of Eve?")
        few, many = Setting(stride=2, limit_tokens=64), Setting(stride=2, limit_tokens=4096)
        with UserSession(PERCACHE, few, notebook) as session:
            idle, _ = self.run_once(session, shape)
            before = session.held().kv_tokens
            session.change(many)
            assert idle.spend(None, first=False).steps["restoration"] >= 1
            assert session.held().kv_tokens > before
            assert "restoration" not in idle.spend(None, first=False).steps

    def test_a_budget_ends_the_work_and_what_went_beyond_it_comes_off_the_next(
        self, notebook, shape, monkeypatch
    ):
        predicting(monkeypatch, ANN, BEN)
        with UserSession(PERCACHE, Setting(stride=1), notebook) as session:
            idle, spell = self.run_once(session, shape, budget=1.0)
            assert spell.steps == {"prediction": 1}
            assert idle.spend(spell.flops - 2.0, first=False).steps == {}
            assert idle.spend(None, first=False).steps

    def test_ours_pays_for_what_it_prepares(self, notebook, shape):
        rows = sum(notebook.chunk_tokens)
        with UserSession(OURS, Setting(), notebook) as session:
            spell = BackgroundRunner(session, shape).spend(1.0, first=True)
        assert spell.steps == {"preparation": 1}
        assert spell.flops >= rows * shape.cost.per_row

    def test_preparing_is_counted_at_the_shape_that_prices_are_for(self, adapter, shape):
        def counted(cost):
            with Notebook(
                USER, Reader(adapter), Words(), recipe_named("reuse"), cost, chunk_tokens=40
            ) as made:
                return made.prepared_flops

        rows = counted(replace(shape.cost, per_row=1, per_key=0, per_logits=0))
        keys = counted(replace(shape.cost, per_row=0, per_key=1, per_logits=0, windows=(None,)))
        wide = replace(shape.cost, per_row=10**6, per_key=10, per_logits=0, windows=(None,) * 24)
        assert rows > 0
        assert counted(wide) == 10**6 * rows + 10 * 24 * keys


class TestLives:
    def journal(self, folder):
        return LineJournal(
            folder, {}, file="sessions.jsonl", version=1, key=lambda one: one.key, read=_session
        )

    def lived(self, folder, adapter, shape, trials):
        with self.journal(folder) as journal:
            return lives.live(
                [USER], {USER.name: trials}, journal, adapter, Words(), recipe_named("reuse"), shape
            )

    def test_a_users_stored_kv_does_not_stay_in_memory(self, adapter, shape, tmp_path, monkeypatch):
        stores = []

        class Seen(UserSession):
            def __init__(self, *given):
                super().__init__(*given)
                stores.append(weakref.ref(self.store))

        monkeypatch.setattr(lives, "UserSession", Seen)
        predicting(monkeypatch, ANN)
        trials = comparison()
        gc.disable()  # the collector's own moment comes when it has counted enough objects, however large
        try:
            self.lived(tmp_path, adapter, shape, trials)
            assert [store() for store in stores] == [None] * len(trials)
        finally:
            gc.enable()

    def test_a_session_that_is_there_is_not_run_again(self, adapter, shape, tmp_path, monkeypatch):
        predicting(monkeypatch, ANN)
        first = self.lived(tmp_path, adapter, shape, comparison())
        assert [session.trial for session in first] == [trial.key for trial in comparison()]
        assert all(len(one.served) == 3 and len(one.idle) == 4 for one in first)

        def fails(*given):
            raise AssertionError("nothing is to be run")

        monkeypatch.setattr(lives, "Notebook", fails)
        assert self.lived(tmp_path, adapter, shape, comparison()) == first

    def test_nobody_spends_more_than_percache_but_for_a_step_begun(
        self, adapter, shape, tmp_path, monkeypatch
    ):
        predicting(monkeypatch, ANN, BEN)
        sessions = {one.trial: one for one in self.lived(None, adapter, shape, comparison())}
        budget = sum(spell.flops for spell in sessions[MEASURED.key].idle)
        for name in ("Sleep-time Compute", "RAGCache + Sleep-time"):
            spent = [spell.flops for spell in sessions[f"systems/{name}"].idle]
            assert sum(spent) <= budget + max(spent)

    def test_settings_change_at_the_middle_question(self, adapter, shape, tmp_path):
        trial = Trial("t", "n", MEANCACHE, Setting(threshold=1.0), Setting(threshold=0.0))
        (session,) = self.lived(None, adapter, shape, [trial])
        assert [served.cache_hit is not None for served in session.served] == [False, True, True]
