"""A knowledge base of one chunk, about which no feature can be computed yet, and one whose chunks just fit."""

import pytest

from support import tiny_kb


@pytest.mark.parametrize("recipe", ["weave", "cachecraft"])
def test_a_single_chunk_lacks_nothing_and_gets_its_feature_with_a_second_one(tiny, tmp_path, recipe):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "first.txt").write_text("Inn.")
    with tiny_kb.open_tiny(tmp_path / "home", recipe=recipe) as base:
        assert base.add(notes).chunks == 1
        assert base.missing_kv() == 0
        assert base.add(notes).chunk_kv_computed == 0
        assert base.ask("Where?").plan.recipe.endswith(recipe)
        (notes / "second.txt").write_text("River.")
        assert base.add(notes).chunk_kv_computed == 2
        assert base.missing_kv() == 0
        assert base.add(notes).chunk_kv_computed == 0


def test_quantised_chunks_that_fit_are_not_left_out(tiny, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "note.txt").write_text(tiny_kb.text(1, parts=12))
    with tiny_kb.open_tiny(tmp_path / "home", recipe="reuse", storage="int4") as base:
        chunks = base.add(notes).chunk_kv_computed
        room = base.store.stats().bytes + chunks * 8192  # an upper bound of the files' sizes
        base.store.clear()
        base.store.set_limit(room)
        report = base.add(notes)
        assert (report.chunk_kv_computed, report.chunk_kv_left_out) == (chunks, 0)
