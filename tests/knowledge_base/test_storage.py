"""A knowledge base whose chunk KV is stored in 8 or 4 bits."""

import pytest

import kvweave
from kvweave.errors import InvalidRequest

QUESTION = "What is the password of Glorric?"


def test_quantised_chunks_are_stored_and_reused(open_kb, documents):
    base = open_kb(recipe="reuse", storage="int8")
    report = base.add(documents)
    kinds = base.store.stats().by_kind
    assert kinds["isolated-int8"].entries == report.chunks
    assert kinds.keys() == {"bare", "isolated-int8"}  # the system prefix stays exact
    assert base.missing_kv() == 0
    answer = base.ask(QUESTION)
    assert answer.text == "walnut"
    assert answer.plan.recipe == "isolated-int8+reuse"
    assert {span.origin for span in answer.plan.spans if span.kind == "chunk"} == {"reused"}
    assert base.store.stats().by_kind.keys() == kinds.keys()  # nothing computed after stale KV is stored


def test_another_storage_gets_its_own_entries_and_leaves_the_others(open_kb, documents):
    first = open_kb(recipe="reuse", storage="int4")
    chunks = first.add(documents).chunks
    first.close()
    exact = open_kb(recipe="reuse", storage="exact")
    assert exact.missing_kv() == chunks
    assert exact.add(documents).chunk_kv_computed == chunks
    kinds = exact.store.stats().by_kind
    assert (kinds["isolated"].entries, kinds["isolated-int4"].entries) == (chunks, chunks)


def test_a_recipe_with_exact_versions_refuses_quantised_storage(open_kb, documents):
    base = open_kb(storage="int8", recipe="cachecraft")
    with pytest.raises(InvalidRequest, match=r"keeps exact versions .* use storage exact"):
        base.add(documents)


def test_by_default_kv_is_quantised_where_the_recipe_allows_it(open_kb, documents, caplog):
    """The default storage is int8 under the plain recipe name; a recipe with exact versions stores exact KV.

    `kvweave.prefill` finds what `add` prepared, and a question whose recipe fits none of it says so.
    """
    with open_kb() as base:
        chunks = base.add(documents).chunks
        assert base.store.stats().by_kind["woven-5-1-int8"].entries == chunks
        assert base.ask(QUESTION).plan.recipe == "weave"
        plan = kvweave.prefill(base.adapter, base.store, base.prompt(QUESTION)).plan
        assert "fresh" not in {span.origin for span in plan.spans if span.kind == "chunk"}
        assert caplog.messages == []
    with open_kb(recipe="isolated-exact+prophetkv") as base:
        assert base.missing_kv() == chunks
    with open_kb() as base:
        base.ask(QUESTION, recipe="epic", cache="off")
    (message,) = caplog.messages
    assert "it was prepared as isolated, not as bare (stored: isolated-int8; looked for: bare-int8" in message
    with open_kb(recipe="cachecraft") as base:
        base.add(documents)
        assert {"isolated", "observed"} <= base.store.stats().by_kind.keys()
