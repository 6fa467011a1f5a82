"""Documents that requests came with and that wait to be prepared: how many a server keeps for that."""

import threading
import time

from kvweave.recipes.methods import METHODS
from kvweave.server.serving import request_chunks
from kvweave.server.serving.request_chunks import RequestChunks
from kvweave.state.active_requests import ProcessActivity


def test_waiting_documents_are_bounded_in_characters(monkeypatch):
    """Under load nothing is prepared, and what waits stays in memory."""
    begin, prepared = threading.Event(), []

    def prepare(self, waiting):
        prepared.append(waiting.texts)
        begin.wait(30)

    def wait_for(count):
        until = time.monotonic() + 30
        while len(prepared) < count and time.monotonic() < until:
            time.sleep(0.005)

    monkeypatch.setattr(RequestChunks, "prepare", prepare)
    monkeypatch.setattr(request_chunks, "MOST_CHARACTERS", 1000)
    chunks = RequestChunks(None, None, None, ProcessActivity(), 0)
    recipe = METHODS["reuse"]()
    chunks.add(["being prepared"], "", recipe, think=False)
    wait_for(1)
    for number in range(10):
        chunks.add([str(number) * 200, str(number) * 200], "", recipe, think=False)
    begin.set()
    wait_for(3)
    chunks.add(["there is room again"], "", recipe, think=False)
    wait_for(4)
    chunks.close()
    assert [texts[0][0] for texts in prepared] == ["b", "0", "1", "t"]
