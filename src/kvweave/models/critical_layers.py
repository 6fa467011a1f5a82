"""The layers whose attention from the question best predicts what decoding attends to; found once per model.

`kvweave profile-layers` measures them and stores them in the home folder, under the model's digest. `load_model` reads
them. Without a measurement, they are the middle layers. Knows nothing of how they are measured.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from kvweave.errors import StoreError
from kvweave.types import ModelFingerprint

COUNT = 3

_LOG = logging.getLogger(__name__)


def middle_layers(layers: int) -> tuple[int, ...]:
    """Return the COUNT middle layers of a model with this number of layers, or all if it has fewer."""
    first = max(0, (layers - COUNT) // 2)
    return tuple(range(first, min(layers, first + COUNT)))


def read_layers(home: Path, model: ModelFingerprint, layers: int) -> tuple[int, ...]:
    """Return the measured layers of this model, else the middle ones; log and ignore a file that cannot be used."""
    path = _path(home, model)
    if not path.exists():
        return middle_layers(layers)
    try:
        found = tuple(json.loads(path.read_text(encoding="utf-8"))["critical_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("ignoring %s: %s; run `kvweave profile-layers` to write it again", path, error)
        return middle_layers(layers)
    if not found or not all(isinstance(layer, int) and 0 <= layer < layers for layer in found):
        _LOG.warning(
            "ignoring %s: it names layers %s of %d; run `kvweave profile-layers` to write it again",
            path,
            found,
            layers,
        )
        return middle_layers(layers)
    return found


def write_layers(home: Path, model: ModelFingerprint, found: Mapping[str, object]) -> Path:
    """Store a measurement, which contains `critical_layers`, and return its file. Raises StoreError if that fails."""
    path = _path(home, model)
    content = {"model": model.name, **found}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".tmp-{os.getpid()}")
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)  # readers see the old file or the whole new one
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; name another --home") from error
    return path


def _path(home: Path, model: ModelFingerprint) -> Path:
    return home / "models" / f"{model.digest}.json"
