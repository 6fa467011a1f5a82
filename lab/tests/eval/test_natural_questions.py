"""A set of documents and questions: read, checked with clear errors, and split by document."""

import collections

import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.eval.natural.questions import SPLITS, read_set, shipped_set, split_by_document
from lab_support.natural_set import DOCUMENTS, QUESTIONS, line, write_set


def test_a_set_is_read_with_the_places_of_its_quotes(tmp_path):
    content = read_set(*write_set(tmp_path))
    assert content.documents == DOCUMENTS
    assert [question.id for question in content.questions] == [each["id"] for each in QUESTIONS]
    quoted = content.questions[2].evidence[1]
    assert content.documents[quoted.doc][quoted.start : quoted.end] == "Osgood says so too"


def test_a_quote_may_have_other_white_space_than_the_document(tmp_path):
    questions = [line("q", "What is green?", ["green"], "within", ("ferry.md", "painted\n it  green."))]
    (question,) = read_set(*write_set(tmp_path, questions)).questions
    assert question.evidence[0].end > question.evidence[0].start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evidence": [{"doc": "ferry.md", "quote": "Osgood sold"}]}, r"line 2 \(q1\): the quote 'Osgood sold' does not"),
        ({"evidence": [{"doc": "gone.md", "quote": "Osgood"}]}, r"line 2 \(q1\): evidence names 'gone.md', which is not"),
        ({"answers": ["Pelle"]}, r"line 2 \(q1\): none of the answers \['Pelle'\] stands in the quotes"),
        ({"answers": []}, r"line 2 \(q1\): has no answers or no evidence"),
        ({"answers": "Osgood"}, r"line 2 \(q1\): answers must be a list of texts"),
        ({"kind": "my own"}, r"line 2 \(q1\): kind is 'my own'; it must be one word"),
        ({"kind": 7}, r"line 2 \(q1\): kind is 7; it must be one word"),
        ({"kind": "unanswerable"}, r"line 2 \(q1\): an unanswerable question has no answers"),
        ({"evidence": [{"doc": "ferry.md"}]}, r"line 2 \(q1\): evidence must be a list of"),
        ({"split": "train"}, r"line 2 \(q1\): split is 'train'; choose one of dev, test"),
        ({"id": "q2"}, r"line 2 \(q2\): line 1 has the same id"),
        ({"question": " "}, r"line 2 \(q1\): question must be a text"),
    ],
)  # fmt: skip
def test_errors_name_the_line_the_question_and_what_is_wrong(tmp_path, change, message):
    questions = [QUESTIONS[1], QUESTIONS[0] | change]
    with pytest.raises(InvalidRequest, match=message):
        read_set(*write_set(tmp_path, questions))


def test_lines_that_are_no_questions_are_named(tmp_path):
    folder, file = write_set(tmp_path)
    file.write_text('{"id": "a"}\nno json\n[]\n')
    with pytest.raises(
        InvalidRequest, match=r"line 1 \(a\): has no answers, evidence, kind, question; line 2 is no JSON"
    ):
        read_set(folder, file)


def test_many_faults_are_counted(tmp_path):
    folder, file = write_set(tmp_path)
    file.write_text("[]\n" * 9)
    with pytest.raises(InvalidRequest, match="and 4 more faults"):
        read_set(folder, file)


def test_a_missing_folder_and_an_empty_set_are_named(tmp_path):
    folder, file = write_set(tmp_path, questions=[])
    with pytest.raises(InvalidRequest, match="holds no questions"):
        read_set(folder, file)
    with pytest.raises(InvalidRequest, match="is no folder"):
        read_set(tmp_path / "gone", file)


def test_documents_that_a_question_links_are_in_one_split(tmp_path):
    content = read_set(*write_set(tmp_path))
    splits = collections.defaultdict(set)
    for question in content.questions:
        for evidence in question.evidence:
            splits[evidence.doc].add(question.split)
    assert all(len(found) == 1 for found in splits.values())
    assert splits["mill.txt"] == splits["letter.txt"]
    counts = collections.Counter(question.split for question in content.questions if question.evidence)
    assert sorted(counts.values()) == [2, 3]
    assert split_by_document(content.questions[::-1])[::-1] == list(content.questions)


def test_a_split_that_is_written_down_is_kept(tmp_path):
    questions = [each | {"split": "test"} for each in QUESTIONS]
    assert {question.split for question in read_set(*write_set(tmp_path, questions)).questions} == {"test"}


def test_the_shipped_set_is_as_large_and_varied_as_it_says():
    content = shipped_set()
    assert len(content.documents) >= 60
    answerable = [question for question in content.questions if question.answers]
    assert len(answerable) >= 600
    assert {question.kind for question in content.questions} == {
        "within", "paragraphs", "documents", "revised", "number", "unanswerable"
    }  # fmt: skip
    linked = {
        tuple(sorted({evidence.doc for evidence in question.evidence}))
        for question in content.questions
        if question.kind == "documents"
    }
    assert len(linked) >= 20
    counts = collections.Counter(question.split for question in answerable)
    assert set(counts) == set(SPLITS)
    assert min(counts.values()) >= 300
    assert list(content.questions) == split_by_document(content.questions)
