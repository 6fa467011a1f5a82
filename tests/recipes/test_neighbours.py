"""Which chunks a chunk is prepared after, and the KV that results."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.context import ChunkList, PrepareContext
from kvweave.recipes.methods.weave import SimilarAndPrevious
from kvweave.recipes.prepare import Previous, Similar, isolated_kv
from kvweave.testing import tiny_adapter

DOCUMENTS = [["a", "bb", "cccc"], ["ccccc", "a"], [], ["bbb"]]


def letters(texts):
    """Vectors by which texts with the same first letter are similar."""
    return np.array([[text[0] == letter for letter in "abc"] for text in texts], dtype=np.float32)


def characters(text):
    return tuple(map(ord, text))


@pytest.fixture
def corpus():
    return ChunkList(DOCUMENTS, characters, letters)


def texts(ids):
    return ["".join(map(chr, chunk)) for chunk in ids]


@pytest.mark.parametrize(
    ("chunk", "most", "before"),
    [
        ("cccc", 2, ["a", "bb"]),
        ("cccc", 1, ["bb"]),
        ("cccc", 9, ["a", "bb"]),
        ("ccccc", 1, []),
        ("bbb", 3, []),
        ("a", 1, []),
    ],
)
def test_previous_chunks_are_of_the_same_document(corpus, chunk, most, before):
    assert texts(corpus.previous(characters(chunk), most)) == before


def test_similar_chunks_come_from_all_documents_without_the_chunk_itself(corpus):
    assert texts(corpus.similar(characters("bb"), 2)) == ["bbb", "a"]
    assert texts(corpus.similar(characters("cccc"), 1)) == ["ccccc"]
    assert len(corpus.similar(characters("a"), 9)) == 4  # the second "a" is the same chunk


@pytest.mark.parametrize(
    ("prepare", "neighbours"),
    [
        (Similar(2), ["bbb", "a"]),
        (Previous(1), ["a"]),
        (SimilarAndPrevious(1, 1), ["bbb", "a"]),
        (
            SimilarAndPrevious(2, 1),
            ["bbb", "cccc", "a"],
        ),  # the previous chunk does not count as similar too
        (SimilarAndPrevious(0, 1), ["a"]),
        (SimilarAndPrevious(2, 0), ["bbb", "a"]),
    ],
)
def test_neighbours_of_a_chunk(corpus, prepare, neighbours):
    ctx = PrepareContext(tiny_adapter(), MemoryStore(), (), corpus)
    assert texts(prepare.neighbours(ctx, characters("bb"))) == neighbours


def test_kv_after_neighbours_is_computed_over_their_isolated_kv():
    adapter = tiny_adapter()
    read = adapter.template.chunk_ids
    ctx = PrepareContext(
        adapter, MemoryStore(), adapter.template.prefix_ids(None), ChunkList(DOCUMENTS, read, letters)
    )
    chunk = tuple(read("bb"))
    made = SimilarAndPrevious(1, 1).compute(ctx, chunk)
    similar, before = (isolated_kv(ctx, tuple(read(text))) for text in ("bbb", "a"))
    wanted = adapter.encode(chunk, ctx.prefix_kv(), similar, before)
    assert torch.equal(made.kv.kv, wanted.kv)
    assert not torch.allclose(made.kv.kv, isolated_kv(ctx, chunk).kv)
    assert len(made.sources) == 3


def test_the_previous_chunk_stays_where_not_all_neighbours_fit(monkeypatch):
    adapter = tiny_adapter()
    read = adapter.template.chunk_ids
    ctx = PrepareContext(
        adapter, MemoryStore(), adapter.template.prefix_ids(None), ChunkList(DOCUMENTS, read, letters)
    )
    chunk, previous = tuple(read("bb")), tuple(read("a"))
    similar = tuple(read("bbb"))
    room = len(ctx.prefix) + len(chunk) + len(previous)
    for context, fitting in (
        (room - 1, []),
        (room, [previous]),
        (room + len(similar), [similar, previous]),
    ):
        monkeypatch.setattr(adapter, "geometry", replace(adapter.geometry, context_tokens=context))
        assert SimilarAndPrevious(2, 1).neighbours(ctx, chunk) == fitting


def test_without_neighbours_one_pass_gives_both_entries(monkeypatch):
    adapter = tiny_adapter()
    read = adapter.template.chunk_ids
    ctx = PrepareContext(
        adapter, MemoryStore(), adapter.template.prefix_ids(None), ChunkList(DOCUMENTS, read, letters)
    )
    chunk = tuple(read("a"))  # the first of its document
    wanted = adapter.encode(chunk, ctx.prefix_kv())
    passes = []
    encode = adapter.encode
    monkeypatch.setattr(adapter, "encode", lambda ids, *before: passes.append(ids) or encode(ids, *before))
    made = Previous(1).compute(ctx, chunk)
    assert torch.equal(made.kv.kv, wanted.kv)
    assert torch.equal(isolated_kv(ctx, chunk).kv, wanted.kv)
    assert passes == [chunk]
