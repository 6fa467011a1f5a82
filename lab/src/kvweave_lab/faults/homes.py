"""Knowledge bases of a tiny model, opened in milliseconds: the models are made once, and forks have them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvweave.config import Config, read_config
from kvweave.knowledge_base import KnowledgeBase
from kvweave.models.adapter import Adapter
from kvweave.state.resident import ResidentModels
from kvweave.testing import tiny_adapter

SETTINGS: dict[str, Any] = {
    "recipe": "prefix",  # exact: an answer from stored KV is that of full attention
    "chunk_tokens": 48,
    "top_k": 2,
    "system": "Answer.",
    "max_new_tokens": 3,
    "idle_power": "any",
    "idle_load": 1000.0,
    "idle_memory_pressure": 100.0,
}


class Letters:
    """An embedding without a model: counts of letters."""

    name = "letters"
    dimensions = 26

    def load(self) -> None:
        """Do nothing: there is nothing to load."""

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return unit vectors (texts, 26)."""
        counts = [[text.count(chr(ord("a") + i)) + 1 for i in range(self.dimensions)] for text in texts]
        vectors = np.array(counts, dtype=np.float32).reshape(-1, self.dimensions)
        unit: npt.NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


class TinyModels(ResidentModels):
    """The tiny models in place of those that settings name."""

    judge = None
    rerank = None
    encoder = Letters()  # type: ignore[assignment]

    @property
    def model(self) -> Adapter:
        """The tiny model."""
        return adapter()


@cache
def adapter() -> Adapter:
    """Return the tiny model of this process and its forks."""
    return tiny_adapter()


def open_home(home: Path, **settings: Any) -> KnowledgeBase:
    """Open the knowledge base of a home, or create it."""
    config: Config = read_config(home, {}, **{**SETTINGS, **settings})
    return KnowledgeBase("notes", config, TinyModels(config))
