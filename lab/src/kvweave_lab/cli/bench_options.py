"""What the bench and evaluation commands share: model options, the environment, and where files are written."""

import json as jsons
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from kvweave.cli import options as opt
from kvweave.cli.terminal import keeps_nothing

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter
    from kvweave.types import Storage

Choice = TypeVar("Choice", bound=str)
_P = ParamSpec("_P")

NOTHING_WITHOUT_OUTPUT = "interrupted: nothing is kept without --output; the same command starts over"

DEFAULT_SHAPE = "qwen2.5-0.5b"

Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="A folder on the disk to measure. Default: the folder for temporary files.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class CpuModel:
    """The model that a command measures, on the CPU."""

    shape: Annotated[
        str | None,
        typer.Option("--shape", help=f"A real model's shape, with random weights. Default: {DEFAULT_SHAPE}."),
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", help="A hub id or folder, or `reference`, instead of a shape.")
    ] = None
    dtype: Annotated[str | None, opt.declared("dtype")] = None
    weights: Annotated[str | None, opt.declared("weights")] = None

    def load(self, device: str = "cpu") -> "tuple[Adapter, str]":
        """Return the model and its requested name; raise InvalidRequest for both options and for an unknown name."""
        from kvweave.errors import InvalidRequest
        from kvweave.models.loading import load_model
        from kvweave_lab.shapes import random_model

        model, shape = self.model, self.shape
        how: dict[str, Any] = {
            "dtype": self.dtype or "auto",
            "weights": self.weights or "auto",
            "device": device,
        }
        if model is not None and shape is not None:
            raise InvalidRequest(f"both --model {model} and --shape {shape} are given; give one of them")
        if model is not None:
            return load_model(model, **how), model
        name = shape or DEFAULT_SHAPE
        return random_model(name, **how), name


@dataclass(frozen=True, slots=True)
class DeviceModel(CpuModel):
    """The model that a command measures, on the device of an option."""

    device: Annotated[str | None, opt.declared("device")] = None


def this_command() -> str:
    """Return the running command, to be pasted into a shell."""
    return shlex.join(["kvweave", *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """Return the environment of this measurement as JSON values."""
    from kvweave.results import facts
    from kvweave_lab.bench.measurement import current_environment

    return dict(facts(current_environment(this_command())))


@contextmanager
def temporary_folder(folder: Path | None) -> Iterator[Path]:
    """Provide a temporary folder on the disk to measure; make the folder that is to hold it."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvweave-bench-", dir=folder) as place:
        yield Path(place)


def write_measurement(folder: Path, name: str, content: dict[str, Any], plot: bytes) -> list[Path]:
    """Write a measurement as NAME.json and NAME.png; return the paths."""
    from kvweave_lab.report import write_files

    numbers = (jsons.dumps(content, indent=2) + "\n").encode()
    return write_files(folder, {f"{name}.json": numbers, f"{name}.png": plot})


def append_measurement(path: Path, content: dict[str, Any]) -> None:
    """Append a measurement to a JSON file with a list of them; raise InvalidRequest if the file holds none."""
    from kvweave.errors import InvalidRequest
    from kvweave_lab.report import json_bytes, write_files

    try:
        before = jsons.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read ({error}); name another --output") from error
    if not isinstance(before, list):
        raise InvalidRequest(f"{path} holds no list of measurements; name another --output")
    write_files(path.parent, {path.name: json_bytes([*before, content])})


def print_paths(files: Sequence[Path]) -> None:
    """Print the paths of written files."""
    from kvweave.cli.output import STDOUT

    for file in files:
        STDOUT.print(f"[dim]{file}[/]", soft_wrap=True)


def storages_named(names: Sequence[str]) -> "list[Storage]":
    """Return the storages of these names; raises InvalidRequest for an unknown one."""
    from kvweave.types import STORAGES

    return chosen(names, list(STORAGES.values()), "storage")


def keeps_output(command: Callable[_P, None]) -> Callable[_P, None]:
    """Mark a command that continues from its `output` folder, and starts over without one."""
    without = keeps_nothing(command, NOTHING_WITHOUT_OUTPUT)

    @wraps(command)
    def marked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        (without if kwargs.get("output") is None else command)(*args, **kwargs)

    return marked


def chosen(names: Sequence[str], known: Sequence[Choice], what: str) -> list[Choice]:
    """Return the members of `known` with these names. Raises InvalidRequest, listing `known`, for an unknown name."""
    from kvweave.errors import InvalidRequest

    by_name = {str(one): one for one in known}
    for name in names:
        if name not in by_name:
            raise InvalidRequest(f"there is no {what} {name!r}; choose one of {', '.join(by_name)}")
    return [by_name[name] for name in names]
