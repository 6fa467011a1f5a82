"""Finds a small pretrained model that is on the machine already: what the demonstration answers with. Loads no model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvweave.hub import cached_folder
from kvweave.models.packaged import QWEN_CODER_05B

HUB_IDS: Final = ("Qwen/Qwen2.5-Coder-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct")
"""Models that are looked for in the Hugging Face hub's cache, in this order. Both are under the Apache License 2.0."""


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
