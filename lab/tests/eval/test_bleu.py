"""BLEU against its definition, worked out by hand."""

import sys

import pytest

from kvweave_lab.eval import bleu as scoring
from kvweave_lab.eval.bleu import bleu


@pytest.fixture
def afresh():
    scoring._scorer.cache_clear()
    yield
    scoring._scorer.cache_clear()


def test_it_is_the_geometric_mean_of_what_is_common_in_every_order():
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples; both texts are as long.
    expected = (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert bleu("the cat sat on the mat", ["the cat sat on a mat"]) == pytest.approx(expected)


def test_orders_that_a_short_answer_has_none_of_are_left_out():
    assert bleu("walnut", ["walnut"]) == pytest.approx(1)
    assert bleu("fence, candle", ["fence, candle"]) == pytest.approx(1)
    assert bleu("walnut", ["daisy"]) == bleu("", ["daisy"]) == 0


def test_any_reference_may_have_it():
    assert bleu("walnut", ["daisy", "walnut"]) == pytest.approx(1)


def test_without_sacrebleu_there_is_none(monkeypatch, afresh):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    assert bleu("walnut", ["walnut"]) is None
