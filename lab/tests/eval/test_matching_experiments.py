"""The data of the measurement of what predictions could reach at best."""

import pytest

from kvweave_lab.eval.natural.questions import shipped_set
from kvweave_lab.eval.prediction.run import Request, choose


@pytest.fixture
def reader(script):
    return script("reader_predictions")


def test_the_readers_questions_are_about_the_evaluations_documents(reader):
    content = shipped_set()
    names, asked = choose(content, Request(reader.DOCUMENTS, 60, "test"))
    rows = reader.read_predictions()
    assert [each.doc for each in rows] == [name for name in names for _ in range(6)]
    assert all(content.documents[each.doc].count(each.quote) == 1 for each in rows)
    texts = [text for each in rows for text in each.wordings]
    assert len(set(texts)) == 3 * len(rows)
    assert not set(texts) & {each.text for each in asked} - {"How deep is Lough Keeraun?"}
    about = {each.id: {one.doc for one in each.evidence} for each in asked}
    judged = [(each.doc, id_) for each in rows for id_ in (*each.asked_by, *each.turned)]
    assert all(id_ in about for _, id_ in judged)
    # Of a fact that two documents state, the prediction may be about either.
    assert sum(doc in about[id_] for doc, id_ in judged) >= len(judged) - 4


def test_a_line_or_a_mark_ends_a_sentence(reader):
    text = "# Head\nThe inn is in the north. It costs 1.50 a night!\nTwo words\nA last line without a mark"
    found = [text[start:end].strip() for start, end in reader.sentences(text)]
    assert found == [
        "The inn is in the north.",
        "It costs 1.50 a night!",
        "A last line without a mark",
    ]
