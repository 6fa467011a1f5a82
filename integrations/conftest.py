"""What the tests of all integrations share: one home with a knowledge base over two sample documents."""

import pytest

import kvweave
from kvweave.engine.local import close_local_engines
from kvweave.samples import CHUNK_TOKENS, DOCUMENTS, TOP_K

SETTINGS = {"chunk_tokens": CHUNK_TOKENS, "top_k": TOP_K}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The folder of a knowledge base `notes`; what a test loaded over it is closed after the last one."""
    folder = tmp_path_factory.mktemp("integrations") / "home"
    with kvweave.open("notes", home=folder, **SETTINGS) as base:
        base.add(DOCUMENTS / "passwords.md", DOCUMENTS / "badges.txt")
    yield str(folder)
    close_local_engines()
