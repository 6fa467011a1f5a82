"""Scores how well texts answer a question with a cross-encoder, which reads both together. Loads nothing until it is used."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvweave.embedding import LOADING_LOCK, quiet_loading
from kvweave.errors import ModelNotFound
from kvweave.extras import require
from kvweave.hub import folder_without_hub

BATCH: Final = 16


class Reranker:
    """A cross-encoder of sentence-transformers. Several threads may share one.

    Args:
        model: a hub id or a folder.
    """

    def __init__(self, model: str) -> None:
        self._place = model
        self._loaded: Any = None
        self._lock = threading.RLock()

    def scores(self, question: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text; higher is better. A text is cut at the model's window.

        Raises:
            ModelNotFound: the model cannot be loaded, or gives several scores for a pair.
        """
        if not texts:
            return []
        with self._lock:
            found = self._model().predict(
                [(question, text) for text in texts], batch_size=BATCH, show_progress_bar=False
            )
        return [float(score) for score in found]

    def _model(self) -> Any:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> Any:
        folder = Path(self._place).expanduser()
        looks_local = folder.exists() or self._place.startswith(("/", ".", "~"))
        if looks_local and not folder.is_dir():
            raise ModelNotFound(f"no reranker at {folder}: give a cross-encoder's folder or hub id, or none")
        with LOADING_LOCK, quiet_loading():
            require("kb", f"the reranker {self._place!r}", "sentence_transformers")
            try:
                from sentence_transformers import CrossEncoder

                fetched = None if looks_local else folder_without_hub(self._place)
                if fetched is not None:
                    folder, looks_local = fetched, True
                model = CrossEncoder(
                    str(folder) if looks_local else self._place, local_files_only=looks_local
                )
            except Exception as error:  # hub, network and file errors share no base class
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ModelNotFound(f"the reranker {self._place!r} could not be loaded: {reason}") from error
        if model.num_labels != 1:
            raise ModelNotFound(
                f"the reranker {self._place!r} gives {model.num_labels} scores for a pair; one with a single score is needed"
            )
        return model
