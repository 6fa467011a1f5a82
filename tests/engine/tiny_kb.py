"""Knowledge bases of a tiny model, for processes that come and go: no model is loaded from a disk."""

import importlib
import warnings
from unittest import mock

import numpy as np

import kvweave
from kvweave.testing import tiny_adapter

SETTINGS = {"chunk_tokens": 40, "top_k": 3, "system": "Answer.", "max_new_tokens": 4}


class Letters:
    """Texts as counts of letters: an embedding that takes no model."""

    name = "letters"
    dimensions = 26

    def __init__(self, model=None):
        pass

    def load(self):
        pass

    def encode(self, texts):
        counts = np.array(
            [[text.count(chr(97 + i)) + 1 for i in range(26)] for text in texts], dtype=np.float32
        )
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def load():
    """Put the tiny model and letters in place of what is shipped; returns what undoes that.

    Imports all that indexing and asking take.
    """
    warnings.filterwarnings(
        "ignore", "lancedb fork support"
    )  # nothing of it is under way in a process that forks
    for module in ("indexing", "pipeline"):
        importlib.import_module(f"kvweave.engine.{module}")
    adapter = tiny_adapter()
    patches = [
        mock.patch("kvweave.models.loading.load_model", return_value=adapter),
        mock.patch("kvweave.embedding.TextEncoder", Letters),
    ]
    for patch in patches:
        patch.start()
    return lambda: [patch.stop() for patch in patches]


def open_tiny(home, **settings):
    return kvweave.open("notes", home=home, **SETTINGS, **settings)


def text(number, parts=3):
    """A document's text, every part another chunk."""
    river = "xyz"[number % 3] * 5
    return "\n\n".join(f"Note {number}, part {i}. The {river} river is in the north." for i in range(parts))
