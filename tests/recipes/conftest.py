import pytest
import torch

import kvweave
from kvweave.testing import tiny_adapter

WORDS = "the river in the north and the inn on the road were there when the rain began again".split()


def text(number: int, words: int = 12) -> str:
    picks = torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(number)).tolist()
    return f"{number} " + " ".join(WORDS[i] for i in picks)


@pytest.fixture(scope="module")
def adapter():
    return tiny_adapter()


@pytest.fixture
def store(tmp_path):
    with kvweave.ChunkStore(tmp_path / "store") as store:
        yield store


@pytest.fixture
def prompt():
    return kvweave.Prompt("Where is the inn?", tuple(text(i) for i in range(4)), system="Answer.")
