"""What lab/docs/store.md shows of measurements, and the default storage that follows from them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvweave.config import StoreConfig
from kvweave.recipes.methods import DEFAULT_STORAGE

ROOT = Path(__file__).parents[3]
SOURCE = {"command": "measure", "date": "2026-01-02", "commit": "abc", "machine": "x86", "threads": 2}
SAID = "`measure`, 2026-01-02, abc, x86, 2 threads."


@pytest.fixture
def page(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("store_page")


def cost(storage: str, highest: float, samples: int = 2200) -> dict[str, Any]:
    """Return the cost of a storage for a recipe, up to `highest`."""
    return {
        "context_tokens": 512,
        "recipe": "reuse",
        "ratio": 0.0,
        "coverage": None,
        "storage": storage,
        "samples": samples,
        "exact_score": 0.8,
        "score": 0.799,
        "lost": 0.001,
        "lost_interval": [-0.002, highest],
        "same": 0.98,
    }


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ([], "exact"),
        ([cost("int8", 0.004), cost("int4", 0.01)], "int8"),
        ([cost("int8", 0.006), cost("int4", 0.01)], "exact"),
        ([cost("int8", 0.004), cost("int4", 0.005)], "int4"),
        ([cost("int8", 0.004), cost("int8", 0.006)], "exact"),  # two recipes, of which one loses too much
        ([cost("int8", 0.004, samples=1999)], "exact"),
    ],
)
def test_the_default_is_the_fewest_bits_that_cost_no_recipe_too_much(
    page: ModuleType, costs: list[dict[str, Any]], chosen: str
) -> None:
    assert page.chosen_storage(costs) == chosen


def test_the_default_follows_the_measurement(page: ModuleType) -> None:
    measured = ROOT / "lab" / "results" / "storage.json"
    costs = json.loads(measured.read_text())["storages"] if measured.exists() else []
    assert StoreConfig().storage == "auto"
    assert page.chosen_storage(costs) == DEFAULT_STORAGE


def test_a_missing_measurement_is_stated(page: ModuleType) -> None:
    for part in (page.loaded, page.fetched, page.overlapped, page.fewer_bits):
        assert part(None) == "Not measured yet."


def test_every_storage_is_listed_with_its_cost(page: ModuleType) -> None:
    about = {
        "split": "test",
        "model": "reference",
        "dtype": "float32",
        "device": "cpu",
        "evaluations": ["evaluate"],
    }
    lines = page.fewer_bits({**SOURCE, **about, "storages": [cost("int8", 0.004)]}).split("\n")
    assert lines[4] == (
        "| 512 | `reuse` | 0 | `int8` | 2,200 | 0.800 | 0.799 | +0.0010 (-0.0020 – +0.0040) | 0.980 |"
    )
    assert lines[-1] == "So the default is `int8`. `evaluate`; `measure`, 2026-01-02."


def test_loading_has_a_column_for_each_storage(page: ModuleType) -> None:
    def spread(median: float) -> dict[str, float]:
        return {"median": median, "low": median / 2, "high": median * 2}

    times = ("plain_cold_s", "cold_s", "first_layer_s", "plain_warm_s", "warm_s", "place_s")
    speeds = [
        {
            "storage": storage,
            "bytes": 50_000_000,
            **{name: spread(0.02) for name in times},
            "cold_throughput": spread(0.9),
            "warm_slowdown": spread(1.2),
            "of_prefill": None,
        }
        for storage in ("exact", "int8")
    ]
    about = {"model": "some", "dtype": "bfloat16", "context_tokens": 4096, "chunk_tokens": 512, "rounds": 9}
    said, _, *lines, _, source = page.loaded(
        {**SOURCE, **about, "full_s": spread(12.0), "storages": speeds}
    ).split("\n")
    assert (
        "4,096 tokens in entries of 512, in the shape of some (bfloat16), whose full prefill takes 12.0 s"
        in said
    )
    assert lines[0] == "|  | `exact` | `int8` |"
    assert lines[3] == "| cold: plain read | 20.0 ms (10.0 – 40.0) | 20.0 ms (10.0 – 40.0) |"
    assert lines[-1].startswith("| placed in a prompt |")  # a storage without measurements has no row
    assert source == SAID
    catalog = {"entries": 100_000, "spans": 8, "look_ups": 1000, "look_up_s": spread(0.0002)}
    told = page.loaded({**SOURCE, **about, "full_s": None, "storages": speeds, "catalog": catalog})
    assert told.split("\n")[-3:] == [
        "One look-up of 8 entries in a catalogue of 100,000 takes 0.20 ms (0.10 – 0.40), the median of 1,000.",
        "",
        SAID,
    ]


def test_a_tier_has_a_row_for_each_storage(page: ModuleType) -> None:
    fetched = {
        "tier": "redis",
        "storage": "int4",
        "bytes": 2_000_000,
        "plain_s": [0.001, 0.001, 0.002],
        "fetch_s": [0.002, 0.002, 0.004],
        "throughput_of_plain": [0.5, 0.25, 0.75],
    }
    *_, row, _, source = page.fetched({**SOURCE, "tiers": [fetched]}).split("\n")
    assert row == "| `redis` | `int4` | 2.0 MB | 2,000 MB/s | 1,000 MB/s | 0.50 (0.25 – 0.75) |"
    assert source == SAID
    by_layers = {**fetched, "first_layer_s": [0.004, 0.003, 0.005], "all_layers_s": [0.02, 0.01, 0.03]}
    *_, first, second, _, _ = page.fetched({**SOURCE, "tiers": [by_layers, fetched]}).split("\n")
    assert first == row + " 4.0 ms, 20.0 ms |"
    assert second == row + " – |"


def test_layers_have_a_row_for_each_bandwidth_and_a_column_for_each_case(page: ModuleType) -> None:
    def context(ratio: float) -> dict[str, Any]:
        points = [
            {"round_trip_s": trip, "of_balance": times, "gain": [ratio + trip + times / 100, 0.0, 0.5]}
            for trip in (0.0, 0.005)
            for times in (0.5, 16.0)
        ]
        return {"ratio": ratio, "balance": 300e6, "points": points}

    said, _, *lines, _, source = page.overlapped({**SOURCE, "contexts": [context(0.0), context(0.2)]}).split(
        "\n"
    )
    assert "300 MB/s with 0% recomputed, 300 MB/s with 20% recomputed" in said
    assert lines[0] == (
        "| bandwidth | 0% recomputed, 0 ms round trip | 0% recomputed, 5 ms round trip | 20% recomputed, 0 ms round trip | "
        "20% recomputed, 5 ms round trip |"
    )
    last = " | ".join(f"{gain} (0.0% – 50.0%)" for gain in ("16.0%", "16.5%", "36.0%", "36.5%"))
    assert lines[-1] == f"| 16 × | {last} |"
    assert source == SAID
