"""Neighbours of a chunk in a knowledge base, while documents are added and removed."""

import shutil

import pytest

from kvweave.state.components import ListedCorpus


@pytest.fixture
def base(open_kb, documents):
    """A knowledge base with three documents, one of them in three copies."""
    for name in ("copy.md", "again.md"):
        shutil.copy(documents / "passwords.md", documents / name)
    base = open_kb()
    base.add(documents)
    return base


def corpus_of(base):
    return ListedCorpus(base.state.documents, base.components.index, base.encoder, base.adapter.template)


def chunks_of(base):
    """Return the token ids of the chunks of every listed document, in reading order."""
    found = {}
    rows = base.state.documents.all_chunks()
    texts = base.components.index.texts([row.row_id for row in rows])
    for row in rows:
        found.setdefault(row.source, []).append(tuple(base.adapter.template.chunk_ids(texts[row.row_id])))
    return found


def test_texts_of_several_documents_count_once(base):
    chunks = {ids for own in chunks_of(base).values() for ids in own}
    for ids in chunks:
        for most in (1, 2, len(chunks) - 1):
            others = corpus_of(base).similar(ids, most)
            assert len(others) == len(set(others)) == most
            assert chunks - {ids} >= {*others}


def test_a_chunk_of_a_removed_document_has_no_neighbours(base, documents):
    chunks = chunks_of(base)
    supper = chunks[str(documents / "supper.md")]
    before = corpus_of(base)
    assert before.similar(supper[-1], 1)
    base.remove(documents / "supper.md")
    assert not before.similar(supper[-1], 1)  # it was listed before, but its text is gone
    after = corpus_of(base)
    assert [after.similar(supper[-1], 1), after.previous(supper[-1], 1)] == [[], []]
    kept = chunks[str(documents / "badges.txt")]
    assert after.similar(kept[0], 1)
