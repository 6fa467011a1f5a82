"""A text's KV that outlives the process: what is in memory is written beside the files, and read back.

A folder holds `clusters.pages`, `centroids.pages` and, only while nobody decodes on them, `index`. Resuming takes the
index away before anything can change, so that a process that is killed leaves files that nobody mistakes for whole:
the text is then computed again from its tokens. Everything is checked: the index as a whole, a cluster and a layer's
centroids when they are read.

The index: 8 bytes XXH3-64 of all that follows, then an ordinary safetensors file whose metadata has one JSON text.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import load, save
from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterRetriever
from kvweave.decode.layer import OffloadedLayer
from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings, PageCacheSettings
from kvweave.errors import InvalidRequest, StoreError, StoreFull
from kvweave.files import write_atomically
from kvweave.models.adapter import Adapter

FORMAT = 4
_INDEX = "index"
_PARTS = {"clusters": ClusterSettings, "flash": DiskSettings, "residency": PageCacheSettings}


def new_files(folder: Path) -> tuple[Path, Path]:
    """Where a new text that is to be kept has its files: hand them to `enter`. What was kept there before is void."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / _INDEX, *_files(folder)):
        path.unlink(missing_ok=True)  # else an earlier text's KV would stay behind the end of a shorter one's
    return _files(folder)


def _files(folder: Path) -> tuple[Path, Path]:
    return folder / "clusters.pages", folder / "centroids.pages"


def keep(held: OffloadedCache, folder: Path, token_ids: Sequence[int], model: str) -> None:
    """Write what is needed to go on with a text, after which it may be closed; it may be decoded on as well.

    `token_ids` are all that it stands for, `model` the digest of the model. Its files must lie in `folder`. Going on
    with it here makes the index invalid, so that it is taken away by the next pass. Raises StoreFull or StoreError, in
    which case no index is left; InvalidRequest for a strategy without clusters.
    """
    retrievers = [layer.retriever for layer in held.layers if layer.sliding is None]
    if not all(isinstance(retriever, ClusterRetriever) for retriever in retrievers):
        raise InvalidRequest(f"strategy {held.settings.strategy!r} keeps no clusters that could be resumed")
    if len(token_ids) != held.get_seq_length():
        raise InvalidRequest(
            f"{len(token_ids)} tokens were given for KV of {held.get_seq_length()}; they must be those it was made of"
        )
    store = held.parts.store
    resident = held.flush()
    facts = {
        "format": FORMAT,
        "model": model,
        "settings": dataclasses.asdict(held.settings) | {"folder": None},
        "layers": [[layer.recent.seen, layer.sliding] for layer in held.layers],
        "chosen": [[own.tolist() for own in getattr(layer.retriever, "chosen", ())] for layer in held.layers],
        "centroids": held.parts.representatives.state(),
        "places": store.pages.places.state(),
        "resident": resident,
        "row": store.residents.row,
        "frames": store.residents.frames.count,
        "bytes": [path.stat().st_size for path in _files(folder)],
    }
    tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int64), "positions": held.positions.cpu()}
    for index, layer in enumerate(held.layers):
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in _layer_tensors(layer).items()}
    content = save(tensors, {"facts": json.dumps(facts)})
    try:
        write_atomically(folder / _INDEX, [xxhash.xxh3_64_digest(content), content])
    except OSError as error:
        raise StoreFull(f"the index of the KV could not be written to {folder}: {error.strerror}") from error
    held.before_change(lambda: (folder / _INDEX).unlink(missing_ok=True))


def resume(
    adapter: Adapter, folder: Path, resident_bytes: int | None, expected: Sequence[int] | None = None
) -> tuple[OffloadedCache, list[int]]:
    """Go on with a text that was kept in `folder`: its KV, and the tokens it stands for.

    Its settings are those it was kept with but for `resident_bytes`, the bound from now on. Under the same one decoding
    goes on as if it had not been interrupted: what was in memory is read again; under another as much as has room.

    Raises StoreError where there is no text that was kept as it should be, files are cut short or damaged, or the model or,
    with `expected`, the text is another one; the text must then be computed again. InvalidRequest for a bound that is too small, which changes nothing.
    """
    content = _read_index(folder)
    tensors: dict[str, Tensor] = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    facts = json.loads(header["__metadata__"]["facts"])
    _check(facts, adapter, folder)
    token_ids: list[int] = tensors["token_ids"].tolist()
    if expected is not None and token_ids != list(expected):
        raise StoreError(
            f"{folder} holds another text of {len(token_ids)} tokens; start again from the tokens"
        )
    settings = replace(_settings(facts["settings"]), resident_bytes=resident_bytes)
    held = OffloadedCache(adapter.geometry, settings, tensors["positions"], _files(folder))
    try:
        _restore(held, facts, tensors)
        (folder / _INDEX).unlink()
    except BaseException:
        held.close()
        raise
    return held, token_ids


def _layer_tensors(layer: OffloadedLayer) -> dict[str, Tensor]:
    found = {f"recent.{name}": tensor for name, tensor in layer.recent.state().items()}
    own = layer.retriever
    if isinstance(own, ClusterRetriever):
        found |= {f"table.{name}": torch.from_numpy(array) for name, array in own.table.state().items()}
        found |= {f"waiting.{name}": tensor for name, tensor in own.waiting.state().items()}
        found["thresholds"] = torch.from_numpy(own.thresholds.copy())
    return found


def _restore(held: OffloadedCache, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    held.parts.store.pages.places.restore(facts["places"])
    held.parts.representatives.restore(facts["centroids"])
    for index, layer in enumerate(held.layers):
        seen, sliding = facts["layers"][index]
        recent = _named(tensors, f"{index}.recent.")
        layer.resume({name: part.to(held.geometry.device) for name, part in recent.items()}, seen, sliding)
        own = layer.retriever
        if isinstance(own, ClusterRetriever):
            own.table.restore(
                {name: array.numpy().copy() for name, array in _named(tensors, f"{index}.table.").items()}
            )
            own.waiting.restore(_named(tensors, f"{index}.waiting."))
            own.thresholds = tensors[f"{index}.thresholds"].numpy().copy()
            own.chosen = [np.array(chosen, np.int64) for chosen in facts["chosen"][index]]
    if held.settings.resident_bytes == facts["settings"]["resident_bytes"]:
        frames = held.parts.store.residents.frames
        frames.withdraw(
            max(0, frames.count - facts["frames"])
        )  # what windows and centroids took at their largest
    held.look_at(*range(len(held.layers)))
    held.hold_to_bound()
    held.parts.store.residents.row = facts["row"]
    held.parts.store.restore_resident(facts["resident"])


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): own for name, own in tensors.items() if name.startswith(prefix)}


def _read_index(folder: Path) -> bytes:
    try:
        whole = (folder / _INDEX).read_bytes()
    except FileNotFoundError:
        raise StoreError(
            f"{folder} holds no text that can be gone on with: none was kept, or a process was ended while it decoded; "
            "start again from the tokens"
        ) from None
    except OSError as error:
        raise StoreError(f"{folder / _INDEX} cannot be read: {error.strerror}") from error
    if xxhash.xxh3_64_digest(whole[8:]) != whole[:8]:
        raise StoreError(f"{folder / _INDEX} is damaged; start again from the tokens")
    return whole[8:]


def _check(facts: dict[str, Any], adapter: Adapter, folder: Path) -> None:
    if facts["format"] != FORMAT:
        raise StoreError(f"{folder} was written in format {facts['format']}; this version reads {FORMAT}")
    if facts["model"] != adapter.fingerprint.digest:
        raise StoreError(
            f"{folder} was made with another model than {adapter.fingerprint.name}; use that model, or start again"
        )
    for path, length in zip(_files(folder), facts["bytes"], strict=True):
        found = path.stat().st_size if path.exists() else 0
        if found < length:
            raise StoreError(
                f"{path} has {found} of {length} bytes: it was cut short; start again from the tokens"
            )


def _settings(given: dict[str, Any]) -> OffloadSettings:
    parts = {name: kind(**given.pop(name)) for name, kind in _PARTS.items()}
    return OffloadSettings(**given, **parts)
