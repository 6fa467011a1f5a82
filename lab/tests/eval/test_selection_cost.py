"""The experiment that measures the cost of selections, on a tiny shape."""

import pytest

from kvweave.recipes.methods import METHODS
from kvweave.testing import tiny_adapter
from kvweave_lab.eval.grid import selectors


@pytest.fixture
def cost(script, monkeypatch):
    module = script("selection_cost")
    monkeypatch.setattr(module, "random_model", lambda shape: tiny_adapter(shape))
    return module


def test_every_selector_has_a_share_of_full_prefill(cost):
    names = [name for name in selectors() if name != "reuse"]
    made = cost.measure("qwen3", 96, 24, 0.25, repeats=2, names=names)
    assert {row["recipe"] for row in made["rows"]} | set(made["left_out"]) == set(names)
    assert not set(made["left_out"]) & {"epic", "cacheblend", "prophetkv", "random"}
    low, high = made["full_range_s"]
    assert 0 < low <= made["full_s"] <= high
    for row in made["rows"]:
        for share in ("select_over_full", "ttft_over_full"):
            low, high = row[f"{share}_range"]
            assert 0 < low <= row[share] <= high
        assert row["select_over_full"] < row["ttft_over_full"]
    assert (made["ratio"], made["repeats"], made["dtype"]) == (0.25, 2, "float32")


def test_recipes_without_preparation_are_left_out_with_the_reason(cost, monkeypatch):
    def refuse(*args, recipe, **more):
        if recipe.name == "random":
            raise cost.KvweaveError("there is no room")

    monkeypatch.setattr(cost.kvweave, "prepare", refuse)
    made = cost.measure("qwen3", 48, 24, 0.5, repeats=1, names=["epic", "random"])
    assert [row["recipe"] for row in made["rows"]] == ["epic"]
    assert made["left_out"] == {"random": "there is no room"}


def test_recipes_with_equal_preparations_share_a_store(cost):
    adapter = tiny_adapter()
    recipes = [METHODS[name]() for name in ("random", "prophetkv", "epic")]
    stores, refused = cost.prepare_stores(adapter, ["The inn is here.", "There is rain."], recipes)
    assert refused == {}
    assert stores["random"] is stores["prophetkv"] is not stores["epic"]
