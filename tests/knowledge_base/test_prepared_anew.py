"""Chunks that were prepared after similar ones stay as they are until the store is cleared."""

from support import tiny_kb


def similar_kv(base, text):
    """Return a chunk's KV after similar chunks."""
    adapter = base.adapter
    ids = tuple(adapter.template.chunk_ids(text))
    kinds = base.store.versions(adapter.fingerprint, [ids])[0]
    (provenance,) = [provenance for provenance in kinds if provenance.kind == "similar-10-int8"]
    return base.store.get(adapter.fingerprint, ids, provenance).kv.clone()


def test_after_clearing_chunks_are_prepared_among_all_chunks(tiny, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "first.txt").write_text("Inn.")
    with tiny_kb.open_tiny(tmp_path / "home", recipe="similar+reuse") as base:
        base.add(notes)
        alone = similar_kv(base, "Inn.")
        (notes / "second.txt").write_text("River.")
        assert base.add(notes).chunk_kv_computed == 1
        assert similar_kv(base, "Inn.").equal(alone)
        base.store.clear()
        assert base.add(notes).chunk_kv_computed == 2
        assert not similar_kv(base, "Inn.").allclose(alone)
