"""Questions and answers through the public interface, on the shipped reference model."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvweave
from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.samples import CHUNK_TOKENS, DOCUMENTS, TOP_K, sample_questions

RECIPE = "reuse"  # where a test opens a knowledge base of its own

GLORRIC = "What is the password of Glorric?"


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """A knowledge base without an answer cache, with all sample documents, and the report of their adding.

    Tests here only ask it: the documents are prepared once.
    """
    given = {"recipe": "weave", "chunk_tokens": CHUNK_TOKENS, "top_k": TOP_K, "answer_limit_bytes": 0}
    with kvweave.open("notes", home=tmp_path_factory.mktemp("samples") / "home", **given) as base:
        yield base, base.add(DOCUMENTS)


@pytest.fixture(scope="module")
def expected(added):
    """The answers of full attention to the sample questions, by question."""
    base, _ = added
    return {each.text: base.ask(each.text, recipe="full").text for each in sample_questions()}


@pytest.fixture(scope="module")
def answers(added):
    """The answers under the default recipe to the sample questions, by question."""
    base, _ = added
    return {each.text: base.ask(each.text) for each in sample_questions()}


def test_sample_questions_are_answered_and_only_the_question_is_computed(added, expected, answers):
    _, report = added
    assert report.chunks == report.chunk_kv_computed > len(report.added) > 10
    right = reused = 0
    for question in sample_questions():
        answer = answers[question.text]
        assert answer.plan.fresh_tokens == answer.plan.spans[-1].tokens
        reused += answer.text == question.answer
        right += expected[question.text] == question.answer
    assert right == len(sample_questions())
    assert reused >= 0.6 * right  # plain reuse answers the questions that one chunk answers


def test_answers_at_ratio_one_equal_those_of_full_attention(added, expected):
    base, _ = added
    assert {text: base.ask(text, ratio=1.0).text for text in expected} == expected


def test_an_answer_has_its_sources_and_times(open_kb, documents):
    base = open_kb()
    base.add(documents)
    stream = base.stream(GLORRIC)
    with pytest.raises(InvalidRequest, match="not finished"):
        _ = stream.answer
    assert "".join(stream).strip() == stream.answer.text == "walnut"
    answer = stream.answer
    assert str(documents / "passwords.md") in {source.document for source in answer.sources}
    for source in answer.sources:
        text = documents.joinpath(source.document).read_text()
        assert text[source.start : source.end] == source.text
    timing = answer.timing
    parts = (
        timing.retrieve_s
        + timing.tokenize_s
        + timing.match_s
        + timing.place_s
        + timing.select_s
        + timing.recompute_s
    )
    assert 0 < parts <= timing.ttft_s <= timing.total_s
    assert timing.answer_tokens == len(base.adapter.template.tokenize(answer.text))


def test_chunks_of_one_document_are_in_reading_order(answers):
    for answer in answers.values():
        places = [(source.document, source.start) for source in answer.sources]
        by_document = {document: [s for d, s in places if d == document] for document, _ in places}
        assert all(starts == sorted(starts) for starts in by_document.values())


def test_a_too_long_prompt_is_refused_unless_chunks_may_be_dropped(open_kb, documents):
    base = open_kb(max_new_tokens=4000)
    base.add(documents)
    with pytest.raises(PromptTooLong, match="more than the 4096"):
        base.ask(GLORRIC)
    answer = base.ask(GLORRIC, drop_chunks=True)
    assert 0 < len(answer.sources) < 3


def test_tokenization_of_chunks_and_prompts_agrees(open_kb, documents):
    """A chunk has the same token ids in its stored KV and in a prompt; otherwise its KV would never be found."""
    (documents / "odd.txt").write_text("Ruth <eos> <bos> [unk] \u00e9\u4e16 \U0001f600 <pad>\n\n\n lamp")
    base = open_kb()
    base.add(documents)
    plan = base.ask("lamp <eos>", top_k=50).plan
    assert [span.origin for span in plan.spans if span.kind == "chunk"].count("fresh") == 0


def test_sampling_is_reproducible_with_a_seed(open_kb, documents):
    base = open_kb(temperature=5.0, seed=3, max_new_tokens=8)
    base.add(documents)
    torch.manual_seed(0)
    assert base.ask(GLORRIC).text == base.ask(GLORRIC).text != "walnut"


def test_a_second_iteration_yields_nothing_and_keeps_the_answer(open_kb, documents):
    base = open_kb()
    base.add(documents)
    stream = base.stream(GLORRIC)
    assert "".join(stream) == "walnut"
    assert "".join(stream) == ""
    assert stream.answer.text == "walnut"


def test_several_threads_ask_one_knowledge_base(added, answers):
    base, _ = added
    questions = [q.text for q in sample_questions() if q.kind in ("single", "multikey")] * 3
    with ThreadPoolExecutor(4) as pool:
        assert [found.text for found in pool.map(base.ask, questions)] == [answers[q].text for q in questions]
