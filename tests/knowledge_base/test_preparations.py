"""Preparations apart from recipes, and the two kinds of budget, through the public interface."""

import pytest

from kvweave.errors import InvalidRequest, UnknownRecipe

GLORRIC = "What is the password of Glorric?"
FIRST = "no KV after exactly this text; stored for any position (isolated-int8)"
"""Why the first chunk of a prompt has its KV, whatever others are prepared as."""


def reasons(plan):
    """Return the reasons for the KV of all chunks that are not exact."""
    return {span.reason for span in plan.spans if span.kind == "chunk" and span.origin != "exact"}


def test_chunks_are_prepared_under_the_settings_and_found_again(open_kb, documents):
    base = open_kb(recipe="prophetkv", prepare="similar")
    base.add(documents)
    plan = base.ask(GLORRIC, ratio=0.2).plan
    assert plan.recipe == "similar+prophetkv"
    assert reasons(plan) == {
        FIRST,
        "no KV after exactly this text; stored for any position (similar-10-int8)",
    }
    assert base.ask(GLORRIC, recipe="reuse").plan.recipe == "similar+reuse"
    assert base.ask(GLORRIC, recipe="full").plan.recipe == "full"  # full prepares nothing
    assert base.ask(GLORRIC, recipe="following+reuse").plan.recipe == "following+reuse"
    assert (
        base.ask(GLORRIC, recipe="epic", prepare="bare").plan.recipe == "epic"
    )  # bare is epic's own preparation


def test_the_plan_names_the_substitute_for_a_missing_preparation(open_kb, documents):
    base = open_kb()
    base.add(documents)
    isolated = base.ask(GLORRIC, prepare="similar").plan
    assert reasons(isolated) == {
        FIRST,
        "no KV after exactly this text, none prepared as similar-10-int8, similar-10; stored for any position (isolated-int8)",
    }
    bare = base.ask(GLORRIC, recipe="bare+reuse").plan
    assert reasons(bare) == {"no KV after exactly this text, nor for any position (bare-int8, bare)"}
    nothing = base.ask(GLORRIC, recipe="prefix").plan
    assert reasons(nothing) <= {"no KV after exactly this text, and this recipe accepts no other"}


def test_chunks_prepared_after_a_removed_document_are_isolated_until_prepared_again(open_kb, documents):
    base = open_kb(recipe="reuse", prepare="similar")
    base.add(documents)  # few chunks: each is prepared after all others
    base.remove(documents / "supper.md")
    assert base.missing_kv() > 0
    assert "similar-10-int8" not in base.store.stats().by_kind
    assert reasons(base.ask(GLORRIC).plan) == {
        FIRST,
        "no KV after exactly this text, none prepared as similar-10-int8, similar-10; stored for any position (isolated-int8)",
    }
    base.add(documents / "badges.txt")  # unchanged: only missing KV is computed
    assert base.missing_kv() == 0
    assert reasons(base.ask(GLORRIC).plan) == {
        FIRST,
        "no KV after exactly this text; stored for any position (similar-10-int8)",
    }


def test_a_coverage_is_a_budget_and_in_the_plan(open_kb, documents):
    base = open_kb()
    base.add(documents)
    few, many = (base.ask(GLORRIC, recipe="prophetkv", coverage=p).plan for p in (0.1, 0.6))
    assert (few.coverage, many.coverage) == (0.1, 0.6)
    assert 0 < few.recomputed_tokens < many.recomputed_tokens
    assert base.ask(GLORRIC).plan.coverage is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ratio": 0.1, "coverage": 0.2}, "both ratio 0.1 and coverage 0.2 are given; give one of them"),
        ({"recipe": "prophetkv", "coverage": 1.5}, "coverage is 1.5; it is a share"),
        ({"prepare": "boiled"}, "no preparation 'boiled'; choose one of bare, isolated, similar"),
        ({"recipe": "boiled+reuse"}, "no preparation 'boiled'"),
        ({"recipe": "bare+reuse", "prepare": "similar"}, r"'bare\+reuse' names its preparation"),
        ({"recipe": "full", "prepare": "bare"}, "'full' prepares nothing"),
    ],
)
def test_impossible_options_are_refused_before_the_model_is_loaded(open_kb, monkeypatch, asked, said):
    base = open_kb()
    monkeypatch.setattr("kvweave.index.documents.DocumentTable.count", lambda _: 1)
    monkeypatch.setattr("kvweave.models.loading.load_any_model", None)
    with pytest.raises((InvalidRequest, UnknownRecipe), match=said):
        base.ask(GLORRIC, **asked)
