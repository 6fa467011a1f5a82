"""Counts and prices of a pass, and the rows made from them."""

from dataclasses import replace

import pytest
import torch

from kvweave.testing import tiny_adapter
from kvweave_lab.eval.personas.costs import interpolate
from kvweave_lab.eval.personas.model import ModelPass
from kvweave_lab.eval.personas.pricing import Prices, Shape, tail_latency
from kvweave_lab.eval.personas.session import IdlePeriod, ServedQuestion, SessionRecord, StoredTotals
from kvweave_lab.eval.personas.summary import kv_hit, pair_rows, system_rows, user_rows
from kvweave_lab.eval.personas.systems import (
    OURS,
    PERCACHE,
    RAGCACHE,
    SYSTEMS,
    Trial,
    budget_trial,
    comparison,
    system_trial,
    without,
)
from lab_support.personas import COSTS


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def prices(adapter):
    return Prices(COSTS, Shape.of(adapter))


def test_flops_equal_those_of_passes_over_the_same_positions(adapter):
    model_pass = ModelPass(prompt=50, exact=20, decoded=4)
    cost = Shape.of(adapter).cost
    prefill = cost.flops(torch.arange(20, 50), 1)
    decoding = sum(cost.flops(torch.tensor([50 + step]), 1) for step in range(3))
    assert model_pass.rows == 30
    assert Shape.of(adapter).flops(model_pass) == prefill + decoding


def test_recomputed_rows_attend_to_half_of_the_stale_tokens_on_average():
    plain, selecting = ModelPass(prompt=60, exact=10, stale=40), ModelPass(60, 10, 40, recomputed=4)
    assert selecting.rows - plain.rows == 4
    assert selecting.keys - plain.keys == pytest.approx(4 * 30.5)  # positions 10 … 49 see 11 … 50 keys
    assert plain.reused == 50


def test_projections_are_measured_on_the_model(adapter):
    shape = Shape.of(adapter)
    width, queries, keys = 32, 32, 16  # hidden size, 4 heads and 2 KV heads of 8
    assert shape.projected["KV"] == 3 * 2 * 2 * width * keys
    assert shape.projected["QKV"] - shape.projected["KV"] == 3 * 2 * width * queries
    assert shape.token_bytes == 3 * 2 * keys * 4
    assert shape.query_bytes == 3 * queries * 4
    assert shape.stored_bytes(10, "QKV") == 10 * (shape.token_bytes + shape.query_bytes)


def test_projection_reuse_skips_only_the_projections_of_stored_tokens(adapter):
    shape, model_pass = Shape.of(adapter), ModelPass(prompt=50, exact=20)
    everything = shape.flops(ModelPass(prompt=50))
    assert shape.projection_reuse_flops(model_pass, "KV") == everything - 20 * shape.projected["KV"]
    assert shape.flops(model_pass) < shape.projection_reuse_flops(model_pass, "QKV") < everything


@pytest.mark.parametrize(
    ("at", "value"), [(0.5, 0.5), (0, 0), (1, 1), (1.5, 1.5), (3, 5.5), (4, 9), (5, 12.5)]
)
def test_interpolation_is_linear(at, value):
    assert interpolate((1, 2, 4), (1.0, 2.0, 9.0), at) == pytest.approx(value)


def test_a_cached_answer_costs_only_a_look_up(prices):
    hit = ServedQuestion("q", "a", 1.0, 1.0, None, cached_question="other", similarity=0.9)
    priced = prices.request(hit, PERCACHE, "B", "lookup")
    assert priced.latency_s == pytest.approx(0.01 + 0.02)
    assert priced.flops == 0


def test_a_request_is_priced_by_its_parts(prices):
    model_pass = ModelPass(prompt=110, exact=100, decoded=2)
    served = ServedQuestion("q", "a", 1.0, 1.0, model_pass)
    load = 100 * prices.shape.token_bytes * 1e-6
    around = 0.01 + 0.02 + 0.03 + 0.04
    decode = 2 * (0.1 + (111 - 100) / 100 * 0.1)
    ordinary = prices.request(served, PERCACHE, "B", "lookup").latency_s
    assert ordinary == pytest.approx(around + load + 2.0 + decode)
    projected = prices.request(served, PERCACHE, "A", "lookup").latency_s
    load_a = 100 * (prices.shape.token_bytes + prices.shape.query_bytes) * 1e-6
    assert projected == pytest.approx(around + load_a + 11.0 - 4.0 + decode)
    only_kv = prices.request(served, RAGCACHE, "A", "lookup").latency_s
    assert only_kv == pytest.approx(around - 0.02 + load + 11.0 - 2.0 + decode)


def test_selection_over_stale_kv_is_priced(prices):
    plain = ServedQuestion("q", "a", 1.0, 1.0, ModelPass(110, stale=100, recomputed=0))
    chosen = ServedQuestion("q", "a", 1.0, 1.0, ModelPass(110, stale=100, recomputed=0, selection_rows=10))
    more = (
        prices.request(chosen, OURS, "B", "lookup").latency_s
        - prices.request(plain, OURS, "B", "lookup").latency_s
    )
    assert more == pytest.approx(1.5)


def test_a_draft_costs_one_pass_and_saves_steps(prices):
    plain = ModelPass(110, exact=100, decoded=3)
    checked = ModelPass(110, exact=100, decoded=3, accepted_draft_tokens=1, draft_passes=(5,))
    assert (plain.steps, checked.steps) == (2, 0)
    assert prices.decode_s(plain) == pytest.approx(3 * (0.1 + (111.5 - 100) / 100 * 0.1))
    draft = 0.3 + 0.1 * 0.1 + (5 - 2) / (6 - 2) * 0.4  # five rows after 110 tokens
    assert prices.decode_s(checked) == pytest.approx(draft + 0.1 + (112.5 - 100) / 100 * 0.1)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_system_decodes_alike(prices, system):
    model_pass = ModelPass(110, decoded=6, accepted_draft_tokens=4, draft_passes=(5,))
    served = ServedQuestion("q", "a", 1.0, 1.0, model_pass)
    plain = replace(served, model_pass=replace(model_pass, accepted_draft_tokens=0, draft_passes=()))
    token, lookup = (prices.request(served, system, "B", way).latency_s for way in ("token", "lookup"))
    assert token == prices.request(plain, system, "B", "lookup").latency_s
    assert token - lookup == pytest.approx(prices.decode_s(plain.model_pass) - prices.decode_s(model_pass))
    assert token != lookup


def test_flops_of_a_draft_equal_those_of_a_pass_over_the_same_positions(adapter):
    cost = Shape.of(adapter).cost
    model_pass = ModelPass(prompt=50, exact=20, decoded=4, accepted_draft_tokens=1, draft_passes=(3,))
    passes = [cost.flops(torch.arange(20, 50), 1), cost.flops(torch.arange(50, 53), 3)]
    step = cost.flops(torch.tensor([52]), 1)
    assert Shape.of(adapter).flops(model_pass) == sum(passes) + step


def test_the_tail_latency_is_exceeded_by_one_request_in_twenty():
    assert tail_latency([float(number) for number in range(100)]) == 95.0
    assert tail_latency([3.0]) == 3.0


def session(system, user, hits, tokens=100):
    served = [
        ServedQuestion(
            "q", "a", 0.5, 0.0, None, cached_question="p" if number % 2 else "q", was_predicted=True
        )
        if number < hits
        else ServedQuestion(
            "q", "b", 1.0, 1.0, ModelPass(tokens, decoded=1), context=80, found=40, found_predicted=20
        )
        for number in range(4)
    ]
    idle = tuple(IdlePeriod({"prediction": 1}, 1e9) for _ in range(5))
    return SessionRecord(
        system_trial(system).key, user, tuple(served), idle, StoredTotals(4, 4, 2048, 100, 3)
    )


def test_rows_are_means_over_users_and_pairs_are_paired(prices):
    sessions = {
        system_trial(system).key: [
            session(system, "one", 2 if system is OURS else 0),
            session(system, "two", 1 if system is OURS else 0),
        ]
        for system in SYSTEMS
    }
    found = system_rows(comparison(), sessions, prices, ["token"])
    rows = {(row.trial, row.table): row for row in found}
    assert len(rows) == 2 * len(SYSTEMS)
    ours = rows["kvweave", "B"]
    assert (ours.users, ours.questions) == (2, 8)
    assert ours.qa_hit.value == pytest.approx(3 / 8)
    assert ours.foreseen.value == pytest.approx(3 / 8)
    assert ours.other_words.value == pytest.approx(1 / 8)  # the second user's only hit has the same words
    assert ours.kv_hit.value == pytest.approx(0.5)
    assert ours.kv_foreseen.value == pytest.approx(0.25)
    assert ours.bleu is None
    assert ours.rouge_l.value == pytest.approx((3 * 0.5 + 5) / 8)
    assert ours.idle_flops == pytest.approx(5e9)
    pairs = {
        (row.system, row.other, row.table): row
        for row in pair_rows("short", "token", SYSTEMS, sessions, prices)
    }
    against = pairs["kvweave", "PerCache", "B"]
    expected = 1 - ours.mean_s.value / rows["PerCache", "B"].mean_s.value
    assert against.faster.value == pytest.approx(expected)
    assert against.faster.low <= against.faster.value <= against.faster.high
    assert against.best_user > against.faster.value
    assert against.exact_match.value == pytest.approx(-3 / 8)


def test_a_user_row_has_the_columns_of_a_system_row(prices):
    trial = next(trial for trial in comparison() if trial.system is OURS)
    sessions = {trial.key: [session(OURS, "one", 2)]}
    totals = {row.table: row for row in system_rows([trial], sessions, prices, ["token"])}
    users = user_rows("short", "token", [OURS], sessions, prices)
    assert [(row.table, row.system, row.user) for row in users] == [
        ("A", "kvweave", "one"),
        ("B", "kvweave", "one"),
    ]
    for row in users:
        whole = totals[row.table]
        for name in ("mean_s", "qa_hit", "kv_hit", "other_words", "foreseen", "rouge_l", "exact_match"):
            assert getattr(row, name) == pytest.approx(getattr(whole, name).value), name
        for name in ("tail_s", "request_flops", "idle_flops", "stored_bytes"):
            assert getattr(row, name) == pytest.approx(getattr(whole, name)), name


def test_kv_hit_is_reused_over_retrieved_tokens():
    assert kv_hit(session(PERCACHE, "one", 2)) == pytest.approx(0.5)
    assert kv_hit(session(PERCACHE, "one", 4)) == 0


def test_bleu_is_a_mean_if_every_answer_has_one(prices):
    one = session(RAGCACHE, "one", 2)
    scored = replace(
        one, served=tuple(replace(s, bleu=0.25 if s.cached_question else 0.75) for s in one.served)
    )
    trial = next(trial for trial in comparison() if trial.system is RAGCACHE)
    (row, _) = system_rows([trial], {trial.key: [scored, scored]}, prices, ["token"])
    assert row.bleu.value == pytest.approx(0.5)
    (row, _) = system_rows([trial], {trial.key: [scored, one]}, prices, ["token"])
    assert row.bleu is None


def test_a_system_without_one_part():
    assert without(PERCACHE, "answers").matching == "none"
    assert without(PERCACHE, "KV").kv == "none"
    assert without(PERCACHE, "prediction").predicts_from == "nothing"
    assert without(PERCACHE, "prediction").fills_answers == {"asked"}


def test_trials_have_distinct_names_and_the_one_that_sets_the_budget_comes_first():
    trials = comparison()
    assert trials[0] == budget_trial()
    assert len({trial.key for trial in trials}) == len(trials) == 8
    assert not {trial.key for trial in trials} & {trial.key for trial in comparison("long")}
    assert {trial.system.name for trial in trials if trial.shares_budget} == {
        "Sleep-time Compute",
        "RAGCache + Sleep-time",
        "kvweave",
    }
    assert isinstance(trials[1], Trial)
