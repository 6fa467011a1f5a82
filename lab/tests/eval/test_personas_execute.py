"""Executed requests: they run the rows that the session's request has, on entries read from files, for all systems in turn."""

from dataclasses import replace

import pytest

from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.personas.corpus import UserCorpus
from kvweave_lab.eval.personas.execute import (
    ExecutedRequest,
    ExecutedUser,
    Executor,
    execute_user,
    executed_rows,
    parse_executed,
)
from kvweave_lab.eval.personas.model import MemoizedModel, ModelPass
from kvweave_lab.eval.personas.pricing import Prices, Shape
from kvweave_lab.eval.personas.session import UserSession
from kvweave_lab.eval.personas.systems import NO_CACHE, OURS, RAGCACHE, Setting, system_trial
from kvweave_lab.results_log import ResultsLog
from lab_support.personas import COSTS, USER, Words, rows_of_passes


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture
def corpus(adapter):
    recipe, cost = recipe_named("reuse"), Shape.of(adapter).cost
    with UserCorpus(USER, MemoizedModel(adapter), Words(), recipe, cost, chunk_tokens=40) as made:
        yield made


@pytest.fixture
def executor(tmp_path):
    with Executor(tiny_adapter(), tmp_path, ("token", "lookup"), Words()) as made:
        yield made
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("system", [NO_CACHE, RAGCACHE, OURS], ids=lambda system: system.name)
def test_the_rows_of_the_sessions_own_request_run(corpus, executor, system):
    with UserSession(system, Setting(), corpus, "long") as session:
        executor.request(session, USER.questions[1], 1)
        with rows_of_passes(executor.adapter) as rows:
            done = executor.request(session, replace(USER.questions[1], text="And the code of Ben?"), 2)
    served = done.served
    assert served.decoded >= 60
    assert (served.exact + served.stale > 0) == (system.kv == "anywhere" or served.stored_spans != ())
    singly = served.decoded - served.draft_pass_tokens
    expected = [served.rows] + [1] * served.decoded + list(served.draft_passes) + [1] * singly
    assert rows == ([served.selection_rows] if served.selection_rows else []) + expected
    assert served.draft_passes
    assert done.latency_s("token") == pytest.approx(
        done.match_s + done.search_s + done.load_s + done.prefill_s + done.decode_s["token"]
    )
    assert (done.load_s > 0) == (system.kv != "none")


def test_a_cached_answer_runs_no_model(corpus, executor):
    with UserSession(OURS, Setting(), corpus) as session:
        executor.request(session, USER.questions[0], 1)
        with rows_of_passes(executor.adapter) as rows:
            done = executor.request(session, USER.questions[0], 2)
    assert rows == []
    assert done.served is None
    assert done.latency_s("token") == done.match_s > 0


def test_systems_take_turns_and_their_requests_are_compared_with_prices(adapter, corpus, executor, tmp_path):
    shape = Shape.of(adapter)
    trials = [system_trial(system) for system in (NO_CACHE, RAGCACHE)]
    none = {trial.key: [None] * (len(USER.questions) + 1) for trial in trials}
    done = execute_user(corpus, trials, none, shape, executor)
    assert [(one.number, one.system) for one in done.requests] == [
        *((1, "RAGCache"), (1, "no cache"), (2, "no cache"), (2, "RAGCache")),
        *((3, "RAGCache"), (3, "no cache")),
    ]
    seconds = execute_user(corpus, trials, none, shape, executor, every=2)
    assert [one.number for one in seconds.requests] == [2, 2]

    fixed = {"match_s": 1.0, "search_s": 0.0, "load_s": 0.0, "prefill_s": 2.0, "decode_s": {"token": 4.0}}
    slow = ExecutedUser("short", "u", tuple(replace(one, **fixed) for one in done.requests))
    rows = executed_rows([slow], ["token"], Prices(COSTS, shape), [NO_CACHE, RAGCACHE])
    assert [(row.system, row.users, row.requests, row.executed_s) for row in rows] == [
        ("no cache", 1, 3, 7.0),
        ("RAGCache", 1, 3, 7.0),
    ]
    assert rows[0].priced_s > rows[1].priced_s  # stored KV saves rows
    assert rows[0].ratio == pytest.approx(7.0 / rows[0].priced_s)


def test_records_survive_the_log(tmp_path):
    requests = (
        ExecutedRequest("kvweave", 1, None, 0.5),
        ExecutedRequest("kvweave", 2, ModelPass(9, stored_spans=(4, 3)), 0.5, decode_s={"token": 1.0}),
    )
    one = ExecutedUser("long", "u", requests)
    for _ in range(2):
        given = {"file": "e.jsonl", "version": 1, "key": lambda each: each.key, "parse": parse_executed}
        with ResultsLog(tmp_path, {}, **given) as log:
            if log.get(one.key) is None:
                log.add(one)
            assert log.get(one.key) == one
