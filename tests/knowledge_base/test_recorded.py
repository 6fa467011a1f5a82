"""Chunk features are computed when documents are added, completed later, and deleted with their documents."""

import pytest

from kvweave.knowledge_base import KnowledgeBase

RECIPE = "reuse"


def kinds(base: KnowledgeBase) -> dict[str, int]:
    return {kind: total.entries for kind, total in base.store.stats().by_kind.items()}


@pytest.mark.parametrize(
    ("recipe", "note"),
    [("cachecraft", "rehearsed-3-8"), ("qcfuse", "importance"), ("weave", "moved-woven-5-1")],
)
def test_features_are_computed_once_also_for_chunks_of_another_recipe(open_kb, documents, recipe, note):
    with open_kb(recipe="reuse") as base:
        base.add(documents)
        chunks = kinds(base)["isolated-int8"]
        assert note not in kinds(base)
    with open_kb(recipe=recipe) as base:
        assert base.missing_kv() == chunks
        assert base.add(documents).chunk_kv_computed == chunks
        assert kinds(base)[note] == chunks
        assert base.missing_kv() == 0
        assert base.add(documents).chunk_kv_computed == 0
        answer = base.ask("What is the password of Glorric?")
        assert answer.plan.recomputed_tokens > 0
        base.remove(documents)
        assert kinds(base).keys() <= {"bare"}  # the system prefix


def test_versions_are_computed_when_documents_are_added(open_kb, documents):
    base = open_kb(recipe="cachecraft")
    base.add(documents)
    made = kinds(base)
    assert made["isolated"] <= made["observed"] <= 3 * made["isolated"]
    assert made["attention"] == made["observed"]
    base.ask("What is the password of Glorric?")
    assert kinds(base) == made  # every chunk was found, so no new KV was computed
