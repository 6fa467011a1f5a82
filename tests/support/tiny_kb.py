"""Knowledge bases of a tiny model for short-lived processes: no model is loaded from disk."""

import importlib
import warnings
from unittest import mock

import numpy as np

import kvweave
from kvweave.testing import tiny_adapter

SETTINGS = {"recipe": "reuse", "chunk_tokens": 40, "top_k": 3, "system": "Answer.", "max_new_tokens": 4}


class Letters:
    """An embedding without a model: counts of letters."""

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
    """Replace the shipped models with the tiny model and `Letters`; return a function that undoes it.

    Imports every module that indexing and asking need.
    """
    warnings.filterwarnings(
        "ignore", "lancedb fork support"
    )  # the process that forks runs no work of lancedb
    for module in ("documents.indexing", "answering.pipeline"):
        importlib.import_module(f"kvweave.{module}")
    adapter = tiny_adapter()
    patches = [
        mock.patch("kvweave.models.loading.load_any_model", return_value=adapter),
        mock.patch("kvweave.embedding.TextEncoder", Letters),
    ]
    for patch in patches:
        patch.start()
    return lambda: [patch.stop() for patch in patches]


def open_tiny(home, **settings):
    return kvweave.open("notes", home=home, **{**SETTINGS, **settings})


def text(number, parts=3):
    """Return a document's text, with one chunk per part."""
    river = "xyz"[number % 3] * 5
    return "\n\n".join(f"Note {number}, part {i}. The {river} river is in the north." for i in range(parts))
