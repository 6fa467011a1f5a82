"""A knowledge base that cannot be opened leaves no database open."""

import pytest

import kvweave
from kvweave.database import Database
from kvweave.errors import StoreBusy
from kvweave.state import knowledge_base_state as state


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
