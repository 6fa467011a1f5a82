"""Persists the KV of a text beyond the process: writes what is in memory to its folder, and reads it back.

A folder holds `clusters.pages` and, only while no process decodes on it, `index`. `resume` deletes the index before
anything changes. A killed process therefore leaves no index, and the text is computed again from its tokens. Everything is
checked: the index as a whole, clusters when they are read.

The index is 8 bytes XXH3-64 of all that follows, then an ordinary safetensors file whose metadata has one JSON text.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash
from safetensors.torch import load, save
from torch import Tensor

from kvweave.decode.clusters.retrieval import ClusterRetriever, with_prefix
from kvweave.decode.layer import OffloadedLayer
from kvweave.decode.offloaded_cache import OUTLINE, OffloadedCache
from kvweave.decode.settings import ClusterSettings, DiskSettings, OffloadSettings
from kvweave.errors import InvalidRequest, StoreError, StoreFull
from kvweave.files import write_atomically
from kvweave.models.adapter import Adapter

FORMAT = 7
_READ = (6, FORMAT)  # before 6, clusters were known by their centroids, in a file of their own
_INDEX, _CLUSTERS, _CENTROIDS = "index", "clusters.pages", "centroids.pages"
_PARTS: Final = {"clusters": ClusterSettings, "disk": DiskSettings}
_STORED_NAMES = {"disk": "flash"}  # settings that have another name in the index


def reset_file(folder: Path) -> Path:
    """Delete what is persisted in `folder`; return the path of a new text's file, for `offload`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_INDEX, _CLUSTERS, _CENTROIDS):
        (folder / name).unlink(
            missing_ok=True
        )  # else the end of a longer text's KV would stay after a shorter one's
    return folder / _CLUSTERS


def persist(cache: OffloadedCache, folder: Path, token_ids: Sequence[int], model_digest: str) -> None:
    """Write what `resume` needs. The cache may be closed afterwards, or continued: the next pass deletes the index.

    `token_ids` are all tokens in the cache, whose file must be in `folder`.

    Raises:
        StoreFull, StoreError: the disk failed; no index is left.
        InvalidRequest: the strategy is none of kvweave, or the number of tokens is wrong.
    """
    if cache.settings.strategy != OUTLINE:
        raise InvalidRequest(
            f"a text of strategy {cache.settings.strategy!r} cannot be kept; decode it with {OUTLINE!r}"
        )
    if len(token_ids) != cache.get_seq_length():
        raise InvalidRequest(
            f"{len(token_ids)} tokens were given for KV of {cache.get_seq_length()}; they must be those it was made of"
        )
    facts = _facts(cache, folder, model_digest, cache.flush())
    tensors = {"token_ids": torch.tensor(token_ids, dtype=torch.int64), "positions": cache.positions.cpu()}
    for index, layer in enumerate(cache.layers):
        tensors |= {f"{index}.{name}": tensor.contiguous() for name, tensor in _layer_tensors(layer).items()}
    content = save(tensors, {"facts": json.dumps(facts)})
    try:
        write_atomically(folder / _INDEX, [xxhash.xxh3_64_digest(content), content])
    except OSError as error:
        raise StoreFull(f"the index of the KV could not be written to {folder}: {error.strerror}") from error
    cache.on_next_change(lambda: (folder / _INDEX).unlink(missing_ok=True))


def resume(
    adapter: Adapter, folder: Path, resident_bytes: int | None, expected: Sequence[int] | None = None
) -> tuple[OffloadedCache, list[int]]:
    """Open a text that was persisted in `folder`; return its cache and its tokens.

    Its settings are the persisted ones, except that `resident_bytes` is the new memory limit. Under the same limit
    decoding continues exactly as without an interruption, since all that was in memory is read again. Under another one,
    as much is read as fits.

    Raises:
        StoreError: nothing is persisted, a file is cut short or damaged, it was made with another model, or its tokens
            are not the `expected` ones. Compute the text again.
        InvalidRequest: the limit is too small; the persisted text stays.
    """
    content = _read_index(folder)
    tensors: dict[str, Tensor] = load(content)
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    facts = json.loads(header["__metadata__"]["facts"])
    _check(facts, adapter, folder)
    if facts["format"] == 6:
        tensors = {name.replace("table.flagged", "table.full"): own for name, own in tensors.items()}
        tensors = {name: own for name, own in tensors.items() if not name.endswith("table.variances")}
    token_ids: list[int] = tensors["token_ids"].tolist()
    if expected is not None and token_ids != list(expected):
        raise StoreError(
            f"{folder} holds another text of {len(token_ids)} tokens; start again from the tokens"
        )
    settings = replace(_settings(facts["settings"], folder), resident_bytes=resident_bytes)
    cache = OffloadedCache(adapter.geometry, settings, tensors["positions"], folder / _CLUSTERS)
    try:
        _restore(cache, facts, tensors)
        (folder / _INDEX).unlink()
        (folder / _CENTROIDS).unlink(missing_ok=True)
    except BaseException:
        cache.close()
        raise
    return cache, token_ids


# Writing


def _facts(
    cache: OffloadedCache, folder: Path, model_digest: str, resident: dict[str, object]
) -> dict[str, Any]:
    """Return the JSON part of the index."""
    store = cache.shared.store
    return {
        "format": FORMAT,
        "model": model_digest,
        "settings": _stored_settings(replace(cache.settings, clusters=cache.shared.clusters)),
        "layers": [[layer.recent.seq_length, layer.sliding_window] for layer in cache.layers],
        "chosen": [
            [own.tolist() for own in getattr(layer.retriever, "selected", ())] for layer in cache.layers
        ],
        "places": store.pages.layout.state(),
        "resident": resident,
        "row": store.page_cache.row,
        "frames": store.page_cache.frames.count,
        "bytes": [(folder / _CLUSTERS).stat().st_size],
    }


def _layer_tensors(layer: OffloadedLayer) -> dict[str, Tensor]:
    found = {f"recent.{name}": tensor for name, tensor in layer.recent.state().items()}
    if isinstance(layer.retriever, ClusterRetriever):
        found |= layer.retriever.state()
    return found


def _stored_settings(settings: OffloadSettings) -> dict[str, Any]:
    plain = dataclasses.asdict(settings) | {"folder": None}
    return {_STORED_NAMES.get(name, name): value for name, value in plain.items()}


# Reading


def _read_index(folder: Path) -> bytes:
    try:
        content = (folder / _INDEX).read_bytes()
    except FileNotFoundError:
        raise StoreError(
            f"{folder} holds no text that can be resumed: none was persisted, or a process was ended while it decoded; start "
            "again from the tokens"
        ) from None
    except OSError as error:
        raise StoreError(f"{folder / _INDEX} cannot be read: {error.strerror}") from error
    if xxhash.xxh3_64_digest(content[8:]) != content[:8]:
        raise StoreError(f"{folder / _INDEX} is damaged; start again from the tokens")
    return content[8:]


def _check(facts: dict[str, Any], adapter: Adapter, folder: Path) -> None:
    """Raise StoreError for another format or model, or files that were cut short."""
    if facts["format"] not in _READ:
        raise StoreError(
            f"{folder} was written in format {facts['format']}; this version reads {_READ[0]} to {FORMAT}"
        )
    if facts["model"] != adapter.fingerprint.digest:
        raise StoreError(
            f"{folder} was made with another model than {adapter.fingerprint.name}; use that model, or start again"
        )
    strategy = facts["settings"]["strategy"]
    if strategy != OUTLINE:
        raise StoreError(
            f"{folder} was made by strategy {strategy!r}, which keeps no text; start again from the tokens"
        )
    path, (length, *_) = folder / _CLUSTERS, facts["bytes"]
    found = path.stat().st_size if path.exists() else 0
    if found < length:
        raise StoreError(
            f"{path} has {found} of {length} bytes: it was cut short; start again from the tokens"
        )


def _settings(stored: dict[str, Any], folder: Path) -> OffloadSettings:
    """Return stored settings; those that there are no more are left out. Raise StoreError for clusters in another layout."""
    parts = {name: stored[_STORED_NAMES.get(name, name)] for name in _PARTS}
    if parts["disk"].get("layout", "dual-head") != "dual-head":
        raise StoreError(
            f"{folder} has clusters in a layout that there is no more; start again from the tokens"
        )
    chosen = {name: kind(**_known(kind, parts[name])) for name, kind in _PARTS.items()}
    return OffloadSettings(**_known(OffloadSettings, stored) | chosen)


def _known(kind: type, stored: dict[str, Any]) -> dict[str, Any]:
    return {field.name: stored[field.name] for field in dataclasses.fields(kind) if field.name in stored}


def _restore(cache: OffloadedCache, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    store, page_cache = cache.shared.store, cache.shared.store.page_cache
    store.pages.layout.restore(facts["places"])
    for index in range(len(cache.layers)):
        _restore_layer(cache, index, facts, tensors)
    if cache.settings.resident_bytes == facts["settings"]["resident_bytes"]:
        # Frames that windows and indexes took at their largest.
        page_cache.frames.withdraw(max(0, page_cache.frames.count - facts["frames"]))
    cache.measure(*range(len(cache.layers)))
    cache.limit.enforce()
    page_cache.row = facts["row"]
    store.restore_resident(facts["resident"])


def _restore_layer(
    cache: OffloadedCache, index: int, facts: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    layer, device = cache.layers[index], cache.geometry.device
    window = {name: part.to(device) for name, part in with_prefix(tensors, f"{index}.recent.").items()}
    layer.restore(window, *facts["layers"][index])
    retriever = layer.retriever
    if isinstance(retriever, ClusterRetriever):
        retriever.restore(with_prefix(tensors, f"{index}."))
        retriever.selected = [np.array(selected, np.int64) for selected in facts["chosen"][index]]
