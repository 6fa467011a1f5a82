"""Contexts from the product's retriever, the evidence in them, and neighbours that are retrieved together."""

import pytest

from kvweave.testing import tiny_adapter
from kvweave_lab.eval.natural.distractors import installed_pages, pages_digest
from kvweave_lab.eval.natural.library import OWN, open_library
from kvweave_lab.eval.natural.prompts import make_prompt, retrieve
from kvweave_lab.eval.natural.retrieval import DEPTHS, NEIGHBOURS, measure_retrieval
from lab_support.natural_set import PAGES, WordEncoder, library_of


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture(scope="module")
def found(adapter, tmp_path_factory):
    return library_of(tmp_path_factory.mktemp("library"), adapter)


def test_pages_of_installed_packages_are_found_always_in_the_same_order():
    pages = installed_pages(40)
    assert len({page.name for page in pages}) == 40
    assert not any(page.name.startswith("kvweave") for page in pages)
    assert pages == installed_pages(60)[:40]
    assert pages_digest(pages) != pages_digest(pages[::-1])


def test_a_quote_is_held_by_the_chunk_that_has_most_of_it(found):
    content, library = found
    for question in content.questions:
        for evidence in question.evidence:
            chunk = library.chunks[library.holder(evidence)]
            assert chunk.document == f"{OWN}{evidence.doc}"
            shared = min(chunk.end, evidence.end) - max(chunk.start, evidence.start)
            assert shared >= (evidence.end - evidence.start) / 3


def test_a_context_has_the_best_chunks_that_fit_in_reading_order(adapter, found):
    content, library = found
    question = content.questions[0]
    prompt = make_prompt(adapter, library, question, 64, None)
    best = library.search(question.text, 200)
    assert {library.number(each) for each in best[: len(prompt.chunks)]} == set(prompt.chunks)
    lengths = [len(library.chunks[library.number(each)].token_ids) for each in best]
    chosen = abs(64 - sum(lengths[: len(prompt.chunks)]))
    assert all(chosen <= abs(64 - sum(lengths[:count])) for count in range(1, len(lengths) + 1))
    for document in {library.chunks[number].document for number in prompt.chunks}:
        inside = [number for number in prompt.chunks if library.chunks[number].document == document]
        assert inside == sorted(inside)
    assert make_prompt(adapter, library, question, 64, None).name == prompt.name
    assert make_prompt(adapter, library, question, 64, "Be brief.").name != prompt.name


def test_one_chunk_is_always_there(found):
    content, library = found
    assert len(retrieve(library, content.questions[0], 1)) == 1


def test_a_library_is_opened_again_without_embedding(adapter, found, tmp_path, monkeypatch):
    content, _ = found
    first = open_library(content, PAGES, adapter.tokenizer, 16, WordEncoder(), tmp_path)
    monkeypatch.setattr(WordEncoder, "encode", None)
    second = open_library(content, PAGES, adapter.tokenizer, 16, WordEncoder(), tmp_path)
    assert second.digest == first.digest
    assert (second.vectors == first.vectors).all()
    assert [path.name for path in tmp_path.iterdir()] == [first.digest]


def test_everything_is_found_where_everything_fits(found):
    content, library = found
    figures = measure_retrieval(library, content.questions, [10_000])
    (context,) = figures.contexts
    assert figures.questions == 5  # one of six has no evidence
    assert context.complete.value == context.evidence.value == 1
    assert context.previous is not None
    assert context.previous.value == 1
    assert context.together[-1].value == context.any_together[0].value == 1
    assert context.by_chance == 1


def test_a_changed_document_makes_chunks_due_that_have_its_own_as_neighbours(found):
    content, library = found
    change = measure_retrieval(library, content.questions, [48]).change
    sources = {chunk.document for number, chunk in enumerate(library.chunks) if library.is_own(number)}
    due = [
        {
            number
            for number, chunk in enumerate(library.chunks)
            if chunk.document != source
            and any(library.chunks[near].document == source for near in library.nearest(number, 3))
        }
        for source in sources
    ]
    assert sum(map(len, due)) > 0
    assert change.others[NEIGHBOURS.index(3)].value == pytest.approx(sum(map(len, due)) / len(sources))
    own = sum(library.is_own(number) for number in range(len(library.chunks)))
    assert change.own.value == pytest.approx(own / len(sources))


def test_rankings_are_those_of_words_and_vectors_alone(found):
    content, library = found
    figures = measure_retrieval(library, content.questions, [48])
    by_name = {ranking.name: ranking for ranking in figures.rankings}
    expected = []
    for question in content.questions:
        if question.evidence:
            cosines = library.vectors @ library.encoder.encode([question.text])[0]
            order = [library.chunks[number].digest for number in (-cosines).argsort(kind="stable")]
            holders = [library.holder(evidence) for evidence in question.evidence]
            inside = [library.chunks[holder].digest in order[: DEPTHS[1]] for holder in holders]
            expected.append(sum(inside) / len(inside))
    assert by_name["vectors"].recall[1].value == pytest.approx(sum(expected) / len(expected))
    for ranking in figures.rankings:
        values = [recall.value for recall in ranking.recall]
        assert values == sorted(values)
        assert ranking.mrr.value <= values[-1]
    (context,) = figures.contexts
    assert len(context.together) == len(NEIGHBOURS)
    assert all(
        few.value <= more.value
        for few, more in zip(context.any_together, context.any_together[1:], strict=False)
    )
