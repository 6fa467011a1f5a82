"""Questions and answers through the public face, on the shipped reference model."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvweave.errors import InvalidRequest, PromptTooLong
from kvweave.samples import DOCUMENTS, sample_questions

GLORRIC = "What is the password of Glorric?"


def test_the_sample_questions_are_answered_and_the_second_time_nothing_but_the_question_is_computed(open_kb):
    base = open_kb()
    report = base.add(DOCUMENTS)
    assert report.chunks == report.chunk_kv_computed > len(report.added) > 10
    right = reused = 0
    for question in sample_questions():
        answer = base.ask(question.text)
        assert answer.plan.fresh_tokens == answer.plan.spans[-1].tokens
        reused += answer.text == question.answer
        right += base.ask(question.text, recipe="full").text == question.answer
    assert right == len(sample_questions())
    assert reused >= 0.6 * right  # what needs no other chunk survives plain reuse


def test_answers_at_ratio_one_are_those_of_full_attention(open_kb):
    base = open_kb()
    base.add(DOCUMENTS)
    for question in sample_questions():
        assert base.ask(question.text, ratio=1.0).text == base.ask(question.text, recipe="full").text


def test_an_answer_says_where_it_came_from_and_where_the_time_went(open_kb, documents):
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


def test_chunks_of_one_document_stand_in_reading_order(open_kb):
    base = open_kb()
    base.add(DOCUMENTS)
    for question in sample_questions():
        places = [(source.document, source.start) for source in base.ask(question.text).sources]
        by_document = {document: [s for d, s in places if d == document] for document, _ in places}
        assert all(starts == sorted(starts) for starts in by_document.values())


def test_a_prompt_that_is_too_long_says_so_and_chunks_are_dropped_only_if_allowed(open_kb, documents):
    base = open_kb(max_new_tokens=4000)
    base.add(documents)
    with pytest.raises(PromptTooLong, match="more than the 4096"):
        base.ask(GLORRIC)
    answer = base.ask(GLORRIC, drop_chunks=True)
    assert 0 < len(answer.sources) < 3


def test_tokenization_of_chunks_and_prompts_agrees(open_kb, documents):
    """The ids a chunk's KV was made from are the ids it has in a prompt; else nothing would ever be found."""
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


def test_iterating_twice_keeps_the_answer(open_kb, documents):
    base = open_kb()
    base.add(documents)
    stream = base.stream(GLORRIC)
    assert "".join(stream) == "walnut"
    assert "".join(stream) == ""
    assert stream.answer.text == "walnut"


def test_threads_may_ask_one_knowledge_base_at_once(open_kb):
    base = open_kb()
    base.add(DOCUMENTS)
    questions = [q for q in sample_questions() if q.kind in ("single", "multikey")] * 3
    expected = [base.ask(q.text).text for q in questions]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda q: base.ask(q.text).text, questions)) == expected
