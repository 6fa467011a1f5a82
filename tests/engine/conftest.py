import pytest
import tiny_kb

import kvweave
from kvweave.samples import CHUNK_TOKENS, TOP_K


@pytest.fixture
def open_kb(tmp_path):
    """Opens knowledge bases under one home, without an answer bank unless asked for; closes them at the end."""
    opened = []

    def make(name="notes", **settings):
        settings = {"chunk_tokens": CHUNK_TOKENS, "top_k": TOP_K, "answer_limit_bytes": 0, **settings}
        opened.append(kvweave.open(name, home=tmp_path / "home", **settings))
        return opened[-1]

    yield make
    for base in opened:
        base.close()


@pytest.fixture
def tiny():
    """The tiny model in place of the shipped one, for `tiny_kb.open_tiny`."""
    undo = tiny_kb.load()
    yield
    undo()
