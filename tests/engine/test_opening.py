"""A knowledge base that cannot be opened leaves no database open."""

import pytest

import kvweave
from kvweave.database import Database
from kvweave.engine import state
from kvweave.errors import StoreBusy


@pytest.mark.parametrize(
    "part",
    [
        "state.PredictionStore",
        "state.BackgroundBudget",
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
        patched.setattr(f"kvweave.engine.{part}", locked)
        with pytest.raises(StoreBusy):
            kvweave.open("notes", home=tmp_path)
    assert [database.closed for database in opened] == [True]
    with kvweave.open("notes", home=tmp_path) as base:
        assert base.documents() == []
