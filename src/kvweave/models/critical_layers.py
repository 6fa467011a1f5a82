"""Layers whose attention from the question tells best what decoding will attend to, as found once for each model.

`kvweave profile-layers` measures them and writes them under the home folder, by the model's digest; whoever loads the
model reads them. Without a measurement they are the layers in the middle. Knows nothing of how they are measured.
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
    """The COUNT layers in the middle of so many, or all of fewer."""
    first = max(0, (layers - COUNT) // 2)
    return tuple(range(first, min(layers, first + COUNT)))


def read_layers(home: Path, model: ModelFingerprint, layers: int) -> tuple[int, ...]:
    """What was written for this model, else the middle ones; a file that cannot be used is logged and passed over."""
    path = _path(home, model)
    if not path.exists():
        return middle_layers(layers)
    try:
        found = tuple(json.loads(path.read_text(encoding="utf-8"))["critical_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s is passed over: %s; `kvweave profile-layers` writes it anew", path, error)
        return middle_layers(layers)
    if not found or not all(isinstance(layer, int) and 0 <= layer < layers for layer in found):
        _LOG.warning(
            "%s is passed over: it names layers %s of %d; `kvweave profile-layers` writes it anew",
            path,
            found,
            layers,
        )
        return middle_layers(layers)
    return found


def write_layers(home: Path, model: ModelFingerprint, found: Mapping[str, object]) -> Path:
    """Write what was found, `critical_layers` among it; returns the file. Raises StoreError if it cannot be written."""
    path = _path(home, model)
    content = {"model": model.name, **found}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".tmp-{os.getpid()}")
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)  # whole or not at all
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; name another --home") from error
    return path


def _path(home: Path, model: ModelFingerprint) -> Path:
    return home / "models" / f"{model.digest}.json"
