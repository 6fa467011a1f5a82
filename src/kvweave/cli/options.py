"""Options that several commands share, each with its environment variable, and how they open a knowledge base."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from kvweave.engine.knowledge_base import KnowledgeBase
    from kvweave.kvstore.reports import TierName
    from kvweave.types import Storage as StorageName

Choice = TypeVar("Choice", bound=str)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

Home = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="KVWEAVE_HOME",
        help="Where everything is stored. Default: the platform's data folder.",
    ),
]
Kb = Annotated[str, typer.Option("--kb", envvar="KVWEAVE_KB", help="Name of the knowledge base.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="KVWEAVE_MODEL",
        help="Hub id or local folder. Default: the one the knowledge base was made with, else the shipped reference model.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", envvar="KVWEAVE_DTYPE", help="auto, float32, bfloat16 or float16.")
]
Device = Annotated[
    str | None, typer.Option("--device", envvar="KVWEAVE_DEVICE", help="auto, cpu, cuda or cuda:N.")
]
EmbeddingModel = Annotated[
    str | None,
    typer.Option(
        "--embedding-model",
        envvar="KVWEAVE_EMBEDDING_MODEL",
        help="A sentence-transformers hub id or folder.",
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system",
        envvar="KVWEAVE_SYSTEM",
        help="The instruction that every prompt starts with; fixed by the first add.",
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        envvar="KVWEAVE_RECIPE",
        help="How stored KV is reused and which tokens are recomputed; an unknown name lists the known ones.",
    ),
]
Prepare = Annotated[
    str | None,
    typer.Option(
        "--prepare",
        envvar="KVWEAVE_PREPARE",
        help="How chunk KV is prepared, if not as the recipe does it; an unknown name lists the known ones.",
    ),
]
Auxiliary = Annotated[
    str | None,
    typer.Option(
        "--auxiliary",
        envvar="KVWEAVE_AUXILIARY",
        help="Hub id or folder of the small model that cacheclip selects tokens with. Default: the shipped one.",
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        envvar="KVWEAVE_STORAGE",
        help="How prepared chunk KV is stored: auto, exact, int8 or int4. Default: auto, which is int8 unless the "
        "recipe needs exact KV.",
    ),
]
Shared = Annotated[
    str | None,
    typer.Option(
        "--shared",
        envvar="KVWEAVE_SHARED",
        help="Address of chunk KV that several machines share: redis://host:6379/0, s3://bucket/prefix.",
    ),
]
Tier = Annotated[
    str | None,
    typer.Option("--tier", help="device, host, disk or shared.", show_default=False),
]
KvBudget = Annotated[
    float | None,
    typer.Option(
        "--kv-budget",
        envvar="KVWEAVE_KV_BUDGET",
        help="KV entries that each decoded token attends to: a share up to 1, or a number above 1. Default: all, in memory.",
    ),
]
ResidentBytes = Annotated[
    str | None,
    typer.Option(
        "--resident-bytes",
        envvar="KVWEAVE_RESIDENT_BYTES",
        help="Most memory for KV while decoding, such as 200MB; the rest is in a file. Default: no limit.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", envvar="KVWEAVE_QUIET", help="No progress bars.")]


def open_kb(name: str, home: Path | None, **settings: Any) -> "KnowledgeBase":
    """Open the existing knowledge base that a command's options name; a setting of None was not given."""
    from kvweave.engine.knowledge_base import open_existing

    return open_existing(name, home=home, **settings)


def make_kb(name: str, home: Path | None, **settings: Any) -> "KnowledgeBase":
    """Open a knowledge base, creating it if it is not there."""
    from kvweave.engine.knowledge_base import open_knowledge_base

    return open_knowledge_base(name, home=home, **settings)


def one_budget(
    context: typer.Context, ratio: float | None, coverage: float | None
) -> tuple[float | None, float | None]:
    """Return ratio and coverage; one given on the command line overrides the other one from the environment."""
    typed = {
        name
        for name in ("ratio", "coverage")
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    }
    if len(typed) == 1:
        return (ratio, None) if "ratio" in typed else (None, coverage)
    return ratio, coverage


def chosen(names: Sequence[str], known: Sequence[Choice], what: str) -> list[Choice]:
    """Return each name as one of the known ones; raises InvalidRequest, listing them, for an unknown one."""
    from kvweave.errors import InvalidRequest

    by_name = {str(one): one for one in known}
    for name in names:
        if name not in by_name:
            raise InvalidRequest(f"there is no {what} {name!r}; choose one of {', '.join(by_name)}")
    return [by_name[name] for name in names]


def tier_named(name: str) -> "TierName":
    """Return the tier of this name; raises InvalidRequest if there is none."""
    from kvweave.kvstore.reports import TIERS

    return chosen([name], TIERS, "tier")[0]


def storages_named(names: Sequence[str]) -> "list[StorageName]":
    """Return the storages of these names; raises InvalidRequest for an unknown one."""
    from kvweave.types import STORAGES

    return chosen(names, list(STORAGES.values()), "storage")


def size_bytes(text: str) -> int:
    """Return a size such as 500MB or 20GB in bytes; raises InvalidRequest."""
    from kvweave.errors import InvalidRequest

    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidRequest(f"{text!r} is not a size; write for example 500MB or 20GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def quiet_libraries() -> None:
    """Keep transformers from printing progress bars and notices."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
