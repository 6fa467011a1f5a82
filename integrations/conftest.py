"""What the tests of all integrations share: one home with a knowledge base over two sample documents."""

import pytest

import kvweave
from kvweave.local import close_local_engines
from kvweave.samples import CHUNK_TOKENS, DOCUMENTS, TOP_K


@pytest.fixture(scope="session")
def knowledge_base(tmp_path_factory):
    """The folder of a knowledge base `notes`."""
    folder = tmp_path_factory.mktemp("integrations") / "home"
    with kvweave.open("notes", home=folder, chunk_tokens=CHUNK_TOKENS, top_k=TOP_K, recipe="reuse") as base:
        base.add(DOCUMENTS / "passwords.md", DOCUMENTS / "badges.txt")
    return str(folder)


@pytest.fixture(scope="module")
def home(knowledge_base):
    """That folder; the engines that a module's tests opened are closed after the last one."""
    yield knowledge_base
    close_local_engines()
