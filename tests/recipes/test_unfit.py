"""Prepared KV is found in whatever storage it is there, and one warning says why none of it fits a prompt."""

import logging

import pytest
import torch

import kvweave
from kvweave.recipes.methods import METHODS
from kvweave.testing import tiny_adapter

WARNING = "no stored KV fits this prompt's chunks, so all are computed: "


def prepare(adapter, store, prompt, **how):
    kvweave.prepare(adapter, store, prompt.chunks, **{"system": prompt.system, **how})


def warnings(caplog):
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("name", ["weave", "reuse", "epic", "prophetkv"])
@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_quantised_kv_is_found_without_naming_the_storage(adapter, store, prompt, name, storage, caplog):
    prepare(adapter, store, prompt, recipe=name, storage=storage)
    kvweave.prefill(adapter, store, prompt, recipe=name)  # leaves the system prefix in the store
    plain = kvweave.prefill(adapter, store, prompt, recipe=name)
    named = kvweave.prefill(adapter, store, prompt, recipe=name, storage=storage)
    assert all(span.origin == "reused" for span in plain.plan.spans if span.kind == "chunk")
    assert torch.equal(plain.logits, named.logits)
    assert plain.plan.recipe == name
    assert warnings(caplog) == []


def test_exact_kv_comes_before_quantised(adapter, store, prompt):
    for storage in ("int4", "exact", "int8"):
        prepare(adapter, store, prompt, recipe="reuse", storage=storage)
    plain = kvweave.prefill(adapter, store, prompt, recipe="reuse")
    assert torch.equal(
        plain.logits, kvweave.prefill(adapter, store, prompt, recipe="reuse", storage="exact").logits
    )


@pytest.mark.parametrize(
    ("how", "searched", "said"),
    [
        ({"recipe": "reuse", "storage": "int8"}, {}, "it was prepared as isolated, not as bare"),
        ({"recipe": "epic", "storage": "int8"}, {"storage": "exact"}, "it is stored as int8, not as exact"),
        ({"recipe": "epic", "system": "Sing."}, {}, None),  # computed after no text at all
    ],
)
def test_one_warning_says_why_nothing_fits(adapter, store, prompt, how, searched, said, caplog):
    prepare(adapter, store, prompt, **how)
    for _ in range(2):
        plan = kvweave.prefill(adapter, store, prompt, recipe="epic", **searched).plan
    assert (said is None) == (plan.reused_tokens > 0)
    assert [each.partition(" (stored")[0] for each in warnings(caplog)] == ([WARNING + said] if said else [])


def test_another_instruction_is_named(adapter, store, prompt, caplog):
    prepare(adapter, store, prompt, recipe="weave", system="Sing.")
    kvweave.prefill(adapter, store, prompt)
    (message,) = warnings(caplog)
    assert message.startswith(f"{WARNING}it was computed after another system instruction (stored: ")
    assert message.endswith(
        "give `prepare`, `storage` and `system` as they were when the chunks were prepared"
    )


def test_another_model_is_named(adapter, store, prompt, caplog):
    prepare(tiny_adapter(seed=1), store, prompt)
    kvweave.prefill(adapter, store, prompt)
    (message,) = warnings(caplog)
    assert "it was made by" in message


def test_chunks_cut_in_another_way_are_named_once(adapter, store, prompt, caplog):
    prepare(adapter, store, prompt)
    for number in range(2):
        other = kvweave.Prompt("?", (f"{number} {prompt.chunks[0]}",), system=prompt.system)
        kvweave.prefill(adapter, store, other)
        prepare(adapter, store, kvweave.Prompt("?", (f"more {number}",), system=prompt.system))
    (message,) = warnings(caplog)
    assert message.startswith("4 chunks are prepared in this store, but none of this prompt's")


@pytest.mark.parametrize("recipe", ["full", "prefix"])
def test_recipes_that_look_for_no_prepared_kv_warn_of_nothing(adapter, store, prompt, recipe, caplog):
    prepare(adapter, store, prompt)
    kvweave.prefill(adapter, store, prompt, recipe=recipe)
    assert warnings(caplog) == []


def test_an_empty_store_and_what_requests_left_are_nothing_to_warn_of(adapter, store, prompt, caplog):
    for chunks in (prompt.chunks, prompt.chunks[::-1], prompt.chunks[1:]):
        kvweave.prefill(adapter, store, kvweave.Prompt("?", chunks, system=prompt.system))
    assert warnings(caplog) == []


def test_a_recipe_object_has_the_storage_it_says(adapter, store, prompt):
    prepare(adapter, store, prompt, recipe="reuse", storage="int8")
    plan = kvweave.prefill(adapter, store, prompt, recipe=METHODS["reuse"]()).plan
    assert plan.reused_tokens == 0
