"""Conversations about documents that are removed or changed: they start over, and their files are deleted."""

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import StoreError
from support import tiny_kb

ASKED = "Where is the river?"


def began(base) -> list[int]:
    """Have a first turn about all documents; return the tokens of the conversation."""
    with base.conversation() as talk:
        "".join(base.send(talk, ASKED))
        return list(talk.token_ids)


def kept(base) -> set[str]:
    return {path.name for path in (base.folder / "conversations" / "default").iterdir()}


def test_removing_a_document_deletes_the_conversations_that_have_read_it(tiny, tmp_path, caplog):
    notes = [tmp_path / f"{number}.txt" for number in range(2)]
    for number, note in enumerate(notes):
        note.write_text(tiny_kb.text(number, parts=1))
    with tiny_kb.open_tiny(tmp_path / "home", kv_budget=1.0) as base:
        base.add(*notes)
        both = began(base)
        assert {"said.json", "index", "clusters.pages"} <= kept(base)
        base.remove(notes[0])
        assert kept(base) == {"lock", "said.json"}
        assert "starts over" not in caplog.text
        with base.conversation() as talk:
            assert talk.token_ids == []
            assert "starts over" in caplog.text
            "".join(base.send(talk, ASKED))
            assert len(talk.token_ids) < len(both)
        base.remove_all()
        assert kept(base) == {"lock", "said.json"}


def test_a_changed_document_makes_a_conversation_start_over_and_an_added_one_does_not(tiny, tmp_path):
    note, other = tmp_path / "note.txt", tmp_path / "other.txt"
    note.write_text(tiny_kb.text(0, parts=1))
    other.write_text(tiny_kb.text(1, parts=1))
    with tiny_kb.open_tiny(tmp_path / "home", kv_budget=1.0) as base:
        base.add(note)
        tokens = began(base)
        base.add(note, other)
        with base.conversation() as talk:
            assert talk.token_ids == tokens
            note.write_text(tiny_kb.text(2, parts=1))
            base.add(note, other)
            assert talk.token_ids == tokens  # an open conversation notices the change in its next turn
            "".join(base.send(talk, ASKED))
            read = base.adapter.template.decode(talk.token_ids)
            assert "Note 2" in read
            assert "Note 0" not in read
        note.unlink()
        base.add(tmp_path)
        with base.conversation() as talk:
            assert talk.token_ids == []


def test_kv_that_is_found_to_be_damaged_while_a_turn_reads_it_is_computed_again(
    tiny, tmp_path, caplog, monkeypatch
):
    note = tmp_path / "note.txt"
    note.write_text(tiny_kb.text(0))
    said = []
    attend, failures = OffloadedCache.attend_turn, iter([StoreError("not what was written")])

    def damaged(cache, call, rows):
        for failure in failures:
            with cache:
                raise failure
        return attend(cache, call, rows)

    for home in ("whole", "damaged"):
        with tiny_kb.open_tiny(tmp_path / home, recipe="prefix") as base:
            base.add(note)
            began(base)
            if home == "damaged":
                monkeypatch.setattr(OffloadedCache, "attend_turn", damaged)
            with base.conversation() as talk:
                "".join(base.send(talk, "And the north?"))
                said.append(list(talk.token_ids))
    assert "is computed again: not what was written" in caplog.text
    assert said[0] == said[1]
