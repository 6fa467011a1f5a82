"""The layers whose attention from the question best predicts what decoding attends to; found once per model.

`kvweave profile-layers` measures them and stores them in the home folder, under the model's digest. `load_model` reads
them. Without a measurement, they are the middle layers. Knows nothing of how they are measured.
"""

import json
import logging
from pathlib import Path

from kvweave.types import ModelFingerprint

COUNT = 3

_LOG = logging.getLogger(__name__)


def middle_layers(layers: int) -> tuple[int, ...]:
    """Return the COUNT middle layers of a model with this number of layers, or all if it has fewer."""
    first = max(0, (layers - COUNT) // 2)
    return tuple(range(first, min(layers, first + COUNT)))


def read_layers(home: Path, model: ModelFingerprint, layers: int) -> tuple[int, ...]:
    """Return the measured layers of this model, else the middle ones; log and ignore a file that cannot be used."""
    path = layers_file(home, model)
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


def layers_file(home: Path, model: ModelFingerprint) -> Path:
    """The file of a model's measured layers."""
    return home / "models" / f"{model.digest}.json"
