"""A running server prepares, between requests, what `kvweave add` and uploads have made answerable."""

import threading
from pathlib import Path

from kvweave.documents import indexing
from kvweave.documents.chunk_preparation import ChunkPreparer
from kvweave.server.process.discovery import record, sole_server
from support.running_server import server

KB = "/v1/kb/default"


def test_a_server_prepares_what_was_added_beside_it_and_uploaded(command, documents, monkeypatch):
    monkeypatch.setattr(indexing, "BATCH_CHUNKS", 1)
    may_begin, work = threading.Event(), ChunkPreparer.work
    monkeypatch.setattr(
        ChunkPreparer, "work", lambda *given, **named: may_begin.wait(60) and work(*given, **named)
    )
    command.environment |= {"KVWEAVE_WAIT": "no", "KVWEAVE_RECIPE": "reuse"}
    home = Path(command.environment["KVWEAVE_HOME"])
    with sole_server(home), server(home, idle_work=True, recipe="reuse", chunk_tokens=48) as running:
        record(home, running.url)

        def left():
            return running.http.get(KB).json()["preparation"]["left"]

        added = command.json("add", documents)
        assert (added["preparation"]["by"], added["preparation"]["address"]) == ("server", running.url)
        assert added["chunk_kv_waiting"] == added["chunks"]
        assert f"the server at {running.url} does it between requests" in command("ls").stderr
        may_begin.set()
        running.wait(lambda: left() == 0, 60)

        files = [("files", ("ferry.txt", b"The ferry leaves at nine."))]
        uploaded = running.http.post(f"{KB}/documents", files=files).json()
        assert (uploaded["vectors_waiting"], uploaded["chunk_kv_waiting"]) == (1, 1)
        assert uploaded["chunk_kv_computed"] == 0
        running.wait(lambda: left() == 0, 60)
        assert running.http.get(KB).json()["preparation"]["left_without_vector"] == 0
        assert all(each["chunks_with_kv"] == each["chunks"] for each in command.json("ls"))
        assert len(command.json("ls")) == 4
