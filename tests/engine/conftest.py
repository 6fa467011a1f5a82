import pytest

import kvweave
from kvweave.samples import CHUNK_TOKENS, TOP_K


@pytest.fixture
def open_kb(tmp_path):
    """Opens knowledge bases under one home; closes them at the end."""
    opened = []

    def make(name="notes", **settings):
        settings = {"chunk_tokens": CHUNK_TOKENS, "top_k": TOP_K, **settings}
        opened.append(kvweave.open(name, home=tmp_path / "home", **settings))
        return opened[-1]

    yield make
    for base in opened:
        base.close()
