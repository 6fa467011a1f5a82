"""One process empties a knowledge base while another one fills it: every listed document is complete."""

import threading

import pytest

from kvweave.errors import StoreError
from support.tiny_kb import open_tiny, text


@pytest.fixture
def bases(tmp_path, tiny):
    """Two open knowledge bases on the same files, as in two processes, with one document."""
    with open_tiny(tmp_path / "home") as one, open_tiny(tmp_path / "home") as other:
        (tmp_path / "0.txt").write_text(text(0))
        (tmp_path / "1.txt").write_text(text(1))
        one.add(tmp_path / "0.txt")
        yield one, other


def is_whole(base):
    return base.lost_documents() == [] and base.missing_kv() == 0 and base.store.verify().sound


def test_a_document_added_right_after_the_removal_keeps_its_index_and_kv(bases, tmp_path, monkeypatch):
    one, other = bases
    forget = one.components.forget

    def added_before():
        assert other.add(tmp_path / "1.txt").chunk_kv_computed > 0
        forget()

    monkeypatch.setattr(one.components, "forget", added_before)
    assert one.remove_all() == [str(tmp_path / "0.txt")]
    assert [document.source for document in other.documents()] == [str(tmp_path / "1.txt")]
    assert is_whole(other)
    assert other.ask("what about 1").sources


def test_a_document_added_while_entries_are_dropped_is_removed_or_complete(bases, tmp_path, monkeypatch):
    one, other = bases
    clear, refusals = one.store.clear, []

    def add():
        try:
            other.add(tmp_path / "1.txt")
        except StoreError as refused:  # the index was deleted before the document was listed
            refusals.append(str(refused))

    adding = threading.Thread(target=add)

    def clear_while_adding():
        adding.start()
        adding.join(timeout=2)  # returns early unless it has to wait for the removal
        return clear()

    monkeypatch.setattr(one.store, "clear", clear_while_adding)
    one.remove_all()
    adding.join()
    assert len(refusals) + len(other.documents()) == 1
    with open_tiny(tmp_path / "home") as later:
        assert is_whole(later)
        later.add(tmp_path / "1.txt")
        assert later.ask("what about 1").sources


def test_documents_whose_vectors_were_deleted_are_not_listed(bases, tmp_path, monkeypatch):
    one, other = bases
    write = other.components.index.add

    def emptied_after(*written):
        write(*written)
        one.remove_all()

    monkeypatch.setattr(other.components.index, "add", emptied_after)
    with pytest.raises(StoreError, match="emptied"):
        other.add(tmp_path / "1.txt")
    assert other.documents() == []
    with open_tiny(tmp_path / "home") as later:
        assert later.add(tmp_path / "1.txt").added
        assert is_whole(later)
