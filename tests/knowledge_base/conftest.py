import pytest

import kvweave
from kvweave.samples import CHUNK_TOKENS, TOP_K
from support import tiny_kb


@pytest.fixture
def open_kb(tmp_path, request):
    """Opens knowledge bases under one home, by default without an answer cache; closes them at the end.

    A test file may name a RECIPE that prepares less than the default one, where nothing depends on it. Answers to the
    sample questions have few tokens; a question whose document is missing is answered at length, which tells nothing more.
    """
    opened = []

    def make(name="notes", **settings):
        recipe = getattr(request.module, "RECIPE", "weave")
        settings = {
            "recipe": recipe,
            "chunk_tokens": CHUNK_TOKENS,
            "top_k": TOP_K,
            "answer_limit_bytes": 0,
            "max_new_tokens": 24,
            **settings,
        }
        opened.append(kvweave.open(name, home=tmp_path / "home", **settings))
        return opened[-1]

    yield make
    for base in opened:
        base.close()


@pytest.fixture
def tiny():
    """Replaces the shipped model with the tiny one, for `tiny_kb.open_tiny`."""
    undo = tiny_kb.load()
    yield
    undo()
