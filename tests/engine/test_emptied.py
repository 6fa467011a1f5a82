"""A knowledge base that one process empties while another one fills it: whatever is listed is whole."""

import threading

import pytest
from tiny_kb import open_tiny, text

from kvweave.errors import StoreError


@pytest.fixture
def bases(tmp_path, tiny):
    """Two processes on one knowledge base with one document in it, as far as files and locks can tell."""
    with open_tiny(tmp_path / "home") as one, open_tiny(tmp_path / "home") as other:
        (tmp_path / "0.txt").write_text(text(0))
        (tmp_path / "1.txt").write_text(text(1))
        one.add(tmp_path / "0.txt")
        yield one, other


def is_whole(base):
    return base.lost_documents() == [] and base.missing_kv() == 0 and base.store.verify().sound


def test_what_is_added_right_behind_the_removal_keeps_its_index_and_kv(bases, tmp_path, monkeypatch):
    one, other = bases
    forget = one._components.forget

    def added_before():
        assert other.add(tmp_path / "1.txt").chunk_kv_computed > 0
        forget()

    monkeypatch.setattr(one._components, "forget", added_before)
    assert one.remove_all() == [str(tmp_path / "0.txt")]
    assert [document.source for document in other.documents()] == [str(tmp_path / "1.txt")]
    assert is_whole(other)
    assert other.ask("what about 1").sources


def test_what_is_added_while_entries_are_dropped_is_removed_as_well_or_whole(bases, tmp_path, monkeypatch):
    one, other = bases
    clear, refusals = one.store.clear, []

    def add():
        try:
            other.add(tmp_path / "1.txt")
        except StoreError as refused:  # the index went before it could be listed there
            refusals.append(str(refused))

    adding = threading.Thread(target=add)

    def clear_beside_it():
        adding.start()
        adding.join(timeout=2)  # unless it has to wait for the removal
        return clear()

    monkeypatch.setattr(one.store, "clear", clear_beside_it)
    one.remove_all()
    adding.join()
    assert len(refusals) + len(other.documents()) == 1
    with open_tiny(tmp_path / "home") as later:
        assert is_whole(later)
        later.add(tmp_path / "1.txt")
        assert later.ask("what about 1").sources


def test_vectors_that_went_with_the_index_are_not_listed(bases, tmp_path, monkeypatch):
    one, other = bases
    write = other._components.index.add

    def emptied_behind(*written):
        write(*written)
        one.remove_all()

    monkeypatch.setattr(other._components.index, "add", emptied_behind)
    with pytest.raises(StoreError, match="emptied"):
        other.add(tmp_path / "1.txt")
    assert other.documents() == []
    with open_tiny(tmp_path / "home") as later:
        assert later.add(tmp_path / "1.txt").added
        assert is_whole(later)
