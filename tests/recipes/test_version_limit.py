"""Requests keep a limited number of exact KV entries of one chunk, and the most used ones stay."""

import kvweave

SHARED = "The inn is in the north."


def test_the_least_used_version_beyond_the_limit_is_dropped(adapter, store, monkeypatch):
    monkeypatch.setattr("kvweave.recipes.recipe.MAX_EXACT_VERSIONS", 3)

    def ask(number):
        chunks = (f"{number} on the road", SHARED)
        prompt = kvweave.Prompt("Where is the inn?", chunks, system="Answer.")
        plan = kvweave.prefill(adapter, store, prompt, recipe="prefix").plan
        return [span.origin for span in plan.spans if span.kind == "chunk"]

    for number in (0, 0, 1, 2, 3, 4):
        ask(number)
    (versions,) = store.versions(adapter.fingerprint, [adapter.template.chunk_ids(SHARED)])
    assert len(versions) == 3
    for number in (0, 3, 4):  # the one used twice, and the latest
        assert ask(number) == ["exact", "exact"]
    assert ask(1) == ["exact", "fresh"]
