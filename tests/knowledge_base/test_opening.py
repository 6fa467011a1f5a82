"""A knowledge base that cannot be opened leaves no database open; one that was opened before a fork is refused after it."""

import os
import signal

import pytest

import kvweave
from kvweave.database import Database
from kvweave.errors import StoreBusy, StoreError
from kvweave.state import knowledge_base_state as state
from support import tiny_kb


@pytest.mark.parametrize(
    "part",
    [
        "state.knowledge_base_state.PredictionStore",
        "state.knowledge_base_state.BackgroundBudget",
        "knowledge_base.KBMetadata",
    ],
)
def test_a_failed_open_closes_the_database(tmp_path, monkeypatch, part):
    opened = []

    def noted(path):
        opened.append(Database(path))
        return opened[-1]

    def locked(*_given, **_named):
        raise StoreBusy("locked by another process")

    with monkeypatch.context() as patched:
        patched.setattr(state, "Database", noted)
        patched.setattr(f"kvweave.{part}", locked)
        with pytest.raises(StoreBusy):
            kvweave.open("notes", home=tmp_path)
    assert [database.closed for database in opened] == [True]
    with kvweave.open("notes", home=tmp_path) as base:
        assert base.documents() == []


def test_a_forked_process_is_refused_in_one_line(tiny, tmp_path):
    (tmp_path / "note.txt").write_text(tiny_kb.text(0))
    with tiny_kb.open_tiny(tmp_path / "home") as base:
        base.add(tmp_path / "note.txt")
        base.ask("Where is the river?")
        child = os.fork()
        if not child:
            signal.alarm(60)  # ends a child that hangs
            try:
                base.ask("Which river is it?")
            except StoreError as error:
                base.close()
                os._exit(3 if "open the knowledge base or store in each process" in str(error) else 4)
            finally:
                os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert base.ask("Where is the river?").text is not None
