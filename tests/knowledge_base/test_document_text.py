"""The text of a document from its chunks."""

import pytest

import kvweave
from kvweave.errors import PathNotFound
from kvweave.knowledge_base import text_of_passages
from kvweave.samples import DOCUMENTS


def test_passages_stand_at_their_offsets():
    assert text_of_passages([(0, "one"), (5, "two"), (7, "o three")]) == "one\n\ntwo three"
    assert text_of_passages([(2, "late")]) == "\n\nlate"
    assert text_of_passages([]) == ""


def test_a_document_comes_back_as_it_was_indexed(tmp_path):
    document = tmp_path / "journey.txt"
    document.write_text("\n\n".join(path.read_text().strip() for path in sorted(DOCUMENTS.glob("*.txt"))))
    with kvweave.open("notes", home=tmp_path / "home", chunk_tokens=64, overlap_tokens=8) as base:
        base.add(document)
        (listed,) = base.documents()
        assert listed.chunks > 11  # more than a page of the index's results
        assert base.document_text(listed.source) == document.read_text()
        (source, *_) = base.ask("What is the ticket number of Yorkport?").sources
        assert base.document_text(source.document)[source.start : source.end] == source.text
        with pytest.raises(PathNotFound, match=r"no document .* 'elsewhere'"):
            base.document_text("elsewhere")
