"""A knowledge base on several tiers, and two knowledge bases on one shared tier."""

import threading

import pytest

from kvweave.answering import pipeline
from kvweave.errors import InvalidRequest

RECIPE = "reuse"

GLORRIC = "What is the password of Glorric?"


def test_kv_of_retrieved_chunks_is_prefetched_before_the_prompt_is_assembled(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    expected = base.ask(GLORRIC)
    base.store.forget_recent()
    order, asked = [], []
    prefetch, template = base.store.prefetch, base.adapter.template
    render = template.render
    monkeypatch.setattr(
        base.store,
        "prefetch",
        lambda *given: (order.append("prefetch"), asked.extend(given[1]), prefetch(*given)),
    )
    monkeypatch.setattr(
        template, "render", lambda *given, **more: (order.append("assemble"), render(*given, **more))[1]
    )
    answer = base.ask(GLORRIC)
    assert order == ["prefetch", "assemble"]
    assert len(asked) == len(answer.sources)
    assert (answer.text, answer.plan) == (expected.text, expected.plan)
    assert base.store.pins.in_use() == frozenset()


def test_recipes_without_position_independent_reuse_prefetch_nothing(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    monkeypatch.setattr(base.store, "prefetch", None)
    for recipe in ("full", "prefix"):
        assert base.ask(GLORRIC, recipe=recipe).text == "walnut"


def test_a_failed_request_releases_its_entries(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    used = []

    def fail(*given, **more):
        used.append(base.store.pins.in_use())
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "run", fail)
    with pytest.raises(ZeroDivisionError):
        base.ask(GLORRIC)
    assert len(used[0]) > 0
    assert base.store.pins.in_use() == frozenset()


def test_a_request_does_not_wait_for_the_loads_of_another(open_kb, documents, monkeypatch):
    base = open_kb()
    base.add(documents)
    base.ask(GLORRIC)
    tiers, go_on = base.store.tiers, threading.Event()
    others = [
        tiers.reads.start(("disk", f"other {number}"), lambda _: go_on.wait(60) and None)
        for number in range(20)
    ]
    try:
        base.store.forget_recent()
        assert base.ask(GLORRIC).text == "walnut"
        assert not go_on.is_set()
    finally:
        go_on.set()
        tiers.reads.wait(others)


def test_a_second_machine_fetches_the_kv_of_the_first(open_kb, documents, tmp_path):
    shared = f"file://{tmp_path}/shared"
    first = open_kb(shared=shared, recipe="reuse")
    chunks = first.add(documents).chunk_kv_computed
    expected = first.ask(GLORRIC)
    first.close()
    second = open_kb_elsewhere(tmp_path, shared)
    try:
        assert second.add(documents).chunk_kv_computed == 0
        assert second.store.stats().by_kind["isolated-int8"].entries == chunks
        answer = second.ask(GLORRIC)
        assert (answer.text, answer.plan) == (expected.text, expected.plan)
        removed = second.remove(documents / "passwords.md")
        assert len(removed) == 1
        assert second.ask(GLORRIC).text != "walnut"
    finally:
        second.close()


def open_kb_elsewhere(tmp_path, shared):
    import kvweave
    from kvweave.samples import CHUNK_TOKENS, TOP_K

    return kvweave.open(
        "notes",
        home=tmp_path / "second home",
        shared=shared,
        recipe="reuse",
        chunk_tokens=CHUNK_TOKENS,
        top_k=TOP_K,
    )


def test_an_unreachable_shared_tier_changes_no_answer(open_kb, documents, caplog):
    base = open_kb(shared="redis://127.0.0.1:1/0")
    base.add(documents)
    assert base.ask(GLORRIC).text == "walnut"
    assert sum("shared tier not used" in record.getMessage() for record in caplog.records) == 1


def test_an_unknown_address_is_refused(open_kb):
    with pytest.raises(InvalidRequest, match="no address of a shared tier"):
        open_kb(shared="somewhere")
