"""What all measurements share on the command line: the model they run, where they write, how they can be repeated."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvweave.models.adapter import Adapter

DEFAULT_SHAPE = "qwen2.5-0.5b"

Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        help=f"A real model's shape, with random weights. Default: {DEFAULT_SHAPE}.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="Instead: a hub id or folder, or `reference`.", show_default=False),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        help="On the disk to measure. Default: the folder for temporary files.",
        show_default=False,
    ),
]


def measured_model(
    shape: str | None, model: str | None, dtype: str | None, device: str
) -> "tuple[Adapter, str]":
    """The model, and the name it was asked for by; raises InvalidRequest for two, and for what there is not."""
    from kvweave.errors import InvalidRequest
    from kvweave.models.loading import load_model
    from kvweave.models.shapes import random_model

    if model is not None and shape is not None:
        raise InvalidRequest(f"both --model {model} and --shape {shape} are given; give one of them")
    if model is not None:
        return load_model(model, dtype=dtype or "auto", device=device), model
    name = shape or DEFAULT_SHAPE
    return random_model(name, dtype=dtype or "auto", device=device), name


def this_command() -> str:
    """The command that is running, to be pasted into a shell."""
    return shlex.join(["kvweave", *sys.argv[1:]])
