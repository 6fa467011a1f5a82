"""A sample's chunks in a knowledge base with other documents."""

from dataclasses import replace

import pytest
import torch

from kvweave.kvstore.memory_store import MemoryStore
from kvweave.recipes.methods import recipe_named
from kvweave.testing import tiny_adapter
from kvweave.types import Prompt
from kvweave_lab.eval.preparation import OtherDocuments, prepare_sample
from kvweave_lab.eval.samples import OTHER_DOCUMENTS, Sample, SampleSpec, generate, with_other_documents
from kvweave_lab.eval.world import Haystack

CHUNKS = ("The inn is in the north.", "There is rain on the river.")
OTHERS = (("The inn is in the south.",), ("There is snow on the river.", "The road then leads on."))
SAMPLE = Sample("here/0", "here", CHUNKS, "Where is the inn?", ("north",), "f1", 4, others=OTHERS)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


def prompt_of(adapter, sample):
    return adapter.template.render(Prompt(sample.question, sample.chunks))


def prepared(adapter, sample, name, store=None):
    """KV of the sample's chunks as a recipe would find them."""
    recipe, prompt = recipe_named(name), prompt_of(adapter, sample)
    store = store if store is not None else MemoryStore()
    prepare_sample(adapter, store, sample, prompt, recipe)
    system, *chunks = (prompt.ids(span) for span in prompt.spans[:-1])
    wanted = [(ids, recipe.prepare.provenances(adapter, system, len(ids))[:1]) for ids in chunks]
    found = (kv.kv for kv, _ in store.find(adapter.fingerprint, wanted))
    return [kv if isinstance(kv, torch.Tensor) else kv.all_layers() for kv in found]


def test_other_documents_are_used_by_the_similar_preparation(adapter):
    alone, among = (
        prepared(adapter, replace(SAMPLE, others=others), "similar+reuse") for others in ((), OTHERS)
    )
    assert all(not torch.allclose(a, b) for a, b in zip(alone, among, strict=True))


@pytest.mark.parametrize("name", ["reuse", "following+reuse", "direct"])
def test_other_documents_change_nothing_else(adapter, name):
    alone, among = (prepared(adapter, replace(SAMPLE, others=others), name) for others in ((), OTHERS))
    assert all(torch.equal(a, b) for a, b in zip(alone, among, strict=True))


def test_only_a_continuing_chunk_is_prepared_after_the_previous_one(adapter):
    begins, goes_on = (
        prepared(adapter, replace(SAMPLE, continuing=(False, continues)), "following+reuse")
        for continues in (False, True)
    )
    isolated = prepared(adapter, SAMPLE, "reuse")
    assert all(torch.equal(a, b) for a, b in zip(begins, isolated, strict=True))
    assert torch.equal(goes_on[0], isolated[0])
    assert not torch.allclose(goes_on[1], isolated[1])


@pytest.mark.parametrize(
    ("continuing", "documents"),
    [
        ((), [["a", "b", "c", "d"]]),
        ((False, False, True, False), [["a"], ["b", "c"], ["d"]]),
        ((True, True, False, True), [["a", "b"], ["c", "d"]]),
    ],
)
def test_documents_of_a_sample(continuing, documents):
    assert replace(SAMPLE, chunks=tuple("abcd"), continuing=continuing).documents == documents


def test_generated_documents_are_cut_where_the_task_cuts_them():
    setting, haystack = SampleSpec("dev", 0, 512, 96), Haystack.of_split("dev")
    coref, single = (
        generate(task, setting, 3, lambda text: len(text.split()), haystack) for task in ("coref", "single")
    )
    assert all(max(map(len, sample.documents)) > 1 for sample in coref)
    assert all(max(map(len, sample.documents)) == 1 for sample in single)


def test_a_chunk_after_others_also_has_isolated_kv(adapter):
    """Whether it is another one's neighbour or not: it is exact where it comes first."""
    store = MemoryStore()
    sample = replace(SAMPLE, chunks=CHUNKS[:1], others=())
    prepared(adapter, sample, "similar+reuse", store)
    prompt = prompt_of(adapter, sample)
    provenances = recipe_named("reuse").prepare.provenances(
        adapter, prompt.ids(prompt.spans[0]), prompt.spans[1].tokens
    )
    assert store.get(adapter.fingerprint, prompt.ids(prompt.spans[1]), provenances[0]) is not None


@pytest.mark.parametrize("name", ["similar+reuse", "similar-int8+reuse"])
def test_what_other_documents_share_is_what_each_sample_would_make(adapter, name):
    documents = OtherDocuments(adapter)
    recipe = recipe_named(name)
    near = replace(SAMPLE, chunks=CHUNKS[:1], others=(*OTHERS[1:], ("The inn is in the west.",)))
    far = replace(SAMPLE, chunks=CHUNKS[1:], others=(("The inn is in the east.",),))
    for sample in (SAMPLE, near, far, SAMPLE):
        shared = MemoryStore(documents.store(sample, prompt_of(adapter, sample), recipe))
        found, alone = prepared(adapter, sample, name, shared), prepared(adapter, sample, name)
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_other_documents_are_prepared_in_every_storage_that_is_asked_for(adapter, monkeypatch):
    documents = OtherDocuments(adapter)
    prompt = prompt_of(adapter, SAMPLE)
    names = ("similar+reuse", "similar-int8+reuse")
    stores = [documents.store(SAMPLE, prompt, recipe_named(name)) for name in names]
    ids = adapter.template.chunk_ids(OTHERS[0][0])
    assert len(stores[0].versions(adapter.fingerprint, [ids])[0]) == len(names)
    monkeypatch.setattr(adapter, "encode", None)  # nothing is computed twice
    for name in names:
        assert documents.store(SAMPLE, prompt, recipe_named(name)) is stores[0]


def test_rehearsals_have_company(adapter):
    """As many chunks of other documents, each document's first before any second."""
    store = MemoryStore()
    prepared(adapter, SAMPLE, "cachecraft", store)
    company = [adapter.template.chunk_ids(text) for text in (OTHERS[0][0], OTHERS[1][0], OTHERS[1][1])]
    versions = store.versions(adapter.fingerprint, company)
    assert [bool(made) for made in versions] == [True, True, False]


def test_samples_are_prepared_with_the_first_others():
    samples = [replace(SAMPLE, chunks=(str(number),)) for number in range(OTHER_DOCUMENTS + 3)]
    beside = with_other_documents(samples)
    assert [sample.chunks for sample in beside] == [sample.chunks for sample in samples]
    first = [(str(number),) for number in range(OTHER_DOCUMENTS + 1)]
    assert list(beside[0].others) == first[1:]
    assert list(beside[OTHER_DOCUMENTS].others) == first[:OTHER_DOCUMENTS]
    assert list(beside[-1].others) == first[:OTHER_DOCUMENTS]


def test_how_many_samples_are_asked_for_changes_none_of_them():
    setting, haystack = SampleSpec("dev", 0, 256, 96), Haystack.of_split("dev")
    one, three = (
        generate("single", setting, samples, lambda text: len(text.split()), haystack) for samples in (1, 3)
    )
    assert three[:1] == one
    assert len(one[0].others) == OTHER_DOCUMENTS
