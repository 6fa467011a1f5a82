"""Of one chunk requests leave only so many entries behind other texts, and those that are asked for again stay."""

import kvweave

SHARED = "The inn is in the north."


def test_beyond_the_most_paths_the_least_used_goes(adapter, store, monkeypatch):
    monkeypatch.setattr("kvweave.recipes.recipe.MOST_PATHS", 3)

    def ask(number):
        chunks = (f"{number} on the road", SHARED)
        prompt = kvweave.Prompt("Where is the inn?", chunks, system="Answer.")
        plan = kvweave.prefill(adapter, store, prompt, recipe="prefix").plan
        return [span.origin for span in plan.spans if span.kind == "chunk"]

    for number in (0, 0, 1, 2, 3, 4):
        ask(number)
    (kept,) = store.versions(adapter.fingerprint, [adapter.template.chunk_ids(SHARED)])
    assert len(kept) == 3
    for number in (0, 3, 4):  # the one that was asked for twice, and the latest
        assert ask(number) == ["exact", "exact"]
    assert ask(1) == ["exact", "fresh"]
