"""Finds the folder of a model that is named as people have them: a GGUF file, a folder that holds one, or one on the hub.

Any other name, a folder of transformers or a hub id of one, is left to `loading`.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from kvweave.errors import InvalidRequest, ModelNotFound, one_line
from kvweave.hub import cached_folder, folder_without_hub
from kvweave.models.gguf.conversions import Conversions, current_report, file_stamps
from kvweave.models.gguf.header import first_parts, is_gguf, parts_of, siblings

_LOG = logging.getLogger(__name__)

_HUB_NAME: Final = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<quant>[\w.-]+))?")
# llama.cpp's rule (common/download.cpp): these quantisations if the caller names none, else the first model of the list.
_DEFAULT_QUANTS: Final = ("Q4_K_M", "Q8_0")
_NO_MODEL: Final = (
    "mmproj",
    "imatrix",
    "mtp-",
    "eagle3-",
    "dflash-",
    "dspark-",
)  # what lies beside models, by file name


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where transformers finds a model, a folder or a hub id, and the name that the model is recorded and reopened under."""

    place: str
    name: str
    shipped: bool = False


def gguf_folder(name: str, home: Path) -> ModelFolder | None:
    """Return the folder that a GGUF model was converted into, converting it if that is not done; None for other names.

    Args:
        name: a GGUF file, or any part of one that is split; a folder that holds one; `hub/repo:QUANT`, or a hub id with
            GGUF in its name.
        home: the home folder, which has the converted models.

    Raises:
        ModelNotFound: the file or the hub's repository does not exist, or is not a whole model.
        InvalidRequest: a folder holds several models.
        UnsupportedModel: the model cannot be run; the message says why.
        StoreError: there is no room in the home folder, or it cannot be written.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        found = _model_in(path)
        return None if found is None else _converted(str(found.absolute()), parts_of(found.absolute()), home)
    if path.is_file():
        if path.suffix.lower() != ".gguf" and not is_gguf(path):
            return None
        parts = parts_of(path.absolute())
        return _converted(str(parts[0]), parts, home)
    if name.lower().endswith(".gguf"):
        return _without_file(path.absolute(), home)
    match = _HUB_NAME.fullmatch(name)
    if match is None or not (match["quant"] or "gguf" in match["repo"].lower()):
        return None
    return _from_hub(name, match["repo"], match["quant"], home)


def _converted(name: str, parts: Sequence[Path], home: Path) -> ModelFolder:
    conversions, stamps = Conversions(home), file_stamps(parts)
    folder = conversions.find(name, stamps)
    if folder is None:
        from kvweave.models.gguf.convert import Conversion

        conversion, report = Conversion(parts), current_report()
        folder = conversions.convert(
            name, stamps, lambda empty: conversion.write(empty, report), conversion.needed_bytes, report
        )
    return ModelFolder(str(folder), name)


def _without_file(path: Path, home: Path) -> ModelFolder:
    """Return what a file that is gone was converted into; raises ModelNotFound if it was not."""
    folder = Conversions(home).find(str(path))
    if folder is None:
        raise ModelNotFound(f"{path} does not exist; name the GGUF file where it is now")
    _LOG.warning("%s does not exist any more; using what it was converted into, %s", path, folder)
    return ModelFolder(str(folder), str(path))


def _model_in(folder: Path) -> Path | None:
    """Return the GGUF model in a folder; None if there is none, or the folder is one of transformers."""
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if weights and (folder / "config.json").exists():
        return None
    models = _models([path.name for path in folder.iterdir() if path.is_file()])
    if len(models) > 1:
        raise InvalidRequest(f"{folder} holds {len(models)} models; name one of them: {', '.join(models)}")
    return folder / models[0] if models else None


def _models(names: Sequence[str]) -> list[str]:
    """Return which of the names, paths perhaps, are of GGUF models; of one in several parts, the first."""
    found = [name for name in sorted(names) if name.lower().endswith(".gguf")]
    return first_parts(
        [name for name in found if not any(each in PurePosixPath(name).name for each in _NO_MODEL)]
    )


# Models on the hub


def _from_hub(name: str, repo: str, quant: str | None, home: Path) -> ModelFolder | None:
    from huggingface_hub import hf_hub_download

    # What was once chosen stays chosen, until `kvweave cache clear`: stored KV fits no other file, and the hub may be far away.
    before = Conversions(home).find(name)
    if before is not None:
        return ModelFolder(str(before), name)
    folder, files, why = _repo_files(repo)
    if not files:
        raise ModelNotFound(
            f"the hub's repository {repo} cannot be listed and was not downloaded before: {why}"
        )
    chosen = choose_model(files, quant)
    if chosen is None:
        if quant is None and not _models(files):
            return None  # of transformers, whatever its name
        raise ModelNotFound(
            f"{repo} has no GGUF model of quantisation {quant}; it has {', '.join(_models(files)) or 'none'}"
        )
    try:
        names = sorted(siblings(chosen, files))
        parts = [folder / name if folder is not None else Path(hf_hub_download(repo, name)) for name in names]
    except Exception as error:  # those of its HTTP client too, which is another one in other versions
        raise ModelNotFound(f"{chosen} of {repo} cannot be downloaded: {one_line(error)}") from error
    return _converted(name, parts_of(parts[0]), home)


def choose_model(files: Sequence[str], quant: str | None) -> str | None:
    """Return the file that llama.cpp takes for `repo:quant`, the first part of it; None if there is none."""
    models = _models(files)
    for wanted in (quant,) if quant else _DEFAULT_QUANTS:
        pattern = re.compile(re.escape(wanted) + "[.-]", re.IGNORECASE)
        for model in models:
            if pattern.search(model):
                return model
    return None if quant or not models else models[0]


def _repo_files(repo: str) -> tuple[Path | None, list[str], str]:
    """Return the files of a repository, or without the hub those downloaded and their folder; and why there are none."""
    from huggingface_hub import list_repo_files

    why, folder = "", folder_without_hub(repo)
    if folder is None:
        try:
            return None, list(list_repo_files(repo)), ""
        except Exception as error:  # offline, no such repository; as above
            why, folder = one_line(error), cached_folder(repo)
    if folder is None:  # nothing of it was downloaded
        return None, [], why
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return folder, files, why
