"""An index that two processes create at the same moment."""

import lancedb

from kvweave.index.vector_index import VectorIndex


def test_a_table_that_another_process_is_creating_is_waited_for(tmp_path, monkeypatch):
    """LanceDB lists it as soon as its folder exists, and cannot open it before its first version is written."""
    VectorIndex(tmp_path, 8)
    opened, tries = lancedb.db.LanceDBConnection.open_table, []

    def not_yet(self, name, **options):
        tries.append(name)
        if len(tries) < 3:
            raise ValueError(f"Table '{name}' was not found")
        return opened(self, name, **options)

    monkeypatch.setattr(lancedb.db.LanceDBConnection, "open_table", not_yet)
    VectorIndex(tmp_path, 8)
    assert len(tries) == 3
