"""Collects what users and stored knowledge bases depend on: commands, public names, entry keys, tables, entry files.

`python tests/golden/pinned.py` writes the golden files again. Do that only for a change that the changelog names.
"""

import base64
import dataclasses
import inspect
import json
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Unpack, get_args, get_origin

import torch
import typer

import kvweave
from kvweave.config import Config
from kvweave.errors import InvalidRequest
from kvweave.kvstore.format import Content, encode_entry
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised
from kvweave.ops.quantise import quantise
from kvweave.recipes.methods import METHODS, recipe_named
from kvweave.testing import tiny_adapter
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, Storage

FOLDER = Path(__file__).parent
IDS = (3, 1, 4, 1, 5, 9, 2, 6)
PREFIX = (2, 7, 1, 8)
STORAGES: tuple[Storage, ...] = ("exact", "int8", "int4")
PUBLIC_CALLS = {
    "open": kvweave.open,
    "load_model": kvweave.load_model,
    "prefill": kvweave.prefill,
    "prepare": kvweave.prepare,
    "generate": kvweave.generate,
    "Prompt": kvweave.Prompt,
    "ChunkStore": kvweave.ChunkStore,
}


def commands() -> dict[str, Any]:
    """Return every command with its parameters: spellings, environment variable, whether it takes a value."""
    from kvweave.cli.app import app

    return dict(_commands(typer.main.get_command(app), "kvweave"))


def _commands(command: Any, path: str) -> Any:
    yield path, [_parameter(each) for each in command.params]
    if hasattr(command, "list_commands"):
        context = command.make_context(path, [], resilient_parsing=True)
        for name in sorted(command.list_commands(context)):
            yield from _commands(command.get_command(context, name), f"{path} {name}")


def _parameter(parameter: Any) -> str:
    option = parameter.param_type_name == "option"
    spelled = "/".join([*parameter.opts, *parameter.secondary_opts]) if option else parameter.name
    takes = "flag" if getattr(parameter, "is_flag", False) else _type(parameter)
    several = " several" if parameter.multiple or parameter.nargs != 1 else ""
    return f"{spelled} {takes}{several} {parameter.envvar or ''}".strip()


def _type(parameter: Any) -> str:
    return str(
        getattr(parameter.type_descriptor.annotation, "__name__", parameter.type_descriptor.annotation)
    )


def public_names() -> dict[str, Any]:
    """Return the package's names, and the parameters of its calls and of a knowledge base's methods."""
    methods = {
        f"KnowledgeBase.{name}": method
        for name, method in inspect.getmembers(kvweave.KnowledgeBase, inspect.isfunction)
        if not name.startswith("_")
    }
    calls = {name: list(_parameters(call)) for name, call in (PUBLIC_CALLS | methods).items()}
    return {"names": list(kvweave.__all__), "parameters": calls}


def _parameters(call: Any) -> Iterator[str]:
    """Yield the names of a call's parameters; the keywords of a typed dictionary are parameters too."""
    for name, parameter in inspect.signature(call).parameters.items():
        if get_origin(parameter.annotation) is Unpack:
            yield from get_args(parameter.annotation)[0].__annotations__
        else:
            yield name


def settings() -> dict[str, Any]:
    """Return the settings of `config.toml` by section; they are also keywords of `kvweave.open`."""
    return {
        field.name: [each.name for each in dataclasses.fields(value)]
        if dataclasses.is_dataclass(value := getattr(Config(home=Path()), field.name))
        else "plain"
        for field in dataclasses.fields(Config)
    }


def entry_keys() -> dict[str, Any]:
    """Return the keys under which each recipe, by its name, looks up chunk KV and stores features."""
    adapter = tiny_adapter()
    found = {}
    for name in METHODS:
        for storage in STORAGES:
            with suppress(InvalidRequest):  # a recipe that keeps exact versions takes no other storage
                found[f"{name} {storage}"] = _keys(adapter, recipe_named(name, storage=storage))
    return found


def _keys(adapter: Any, recipe: Any) -> dict[str, list[str]]:
    provenances = recipe.prepare.provenances(adapter, PREFIX, len(IDS))
    extractors = dict.fromkeys((*recipe.prepare.extractors, *recipe.select.extractors))
    return {
        "kv": [_named(provenance, "kv") for provenance in provenances],
        "notes": [
            _named(extractor.provenance(adapter, PREFIX, len(IDS)), "note") for extractor in extractors
        ],
    }


def _named(provenance: KVProvenance, content: Any) -> str:
    return (
        f"{provenance.kind} {EntryKey('default', 'a' * 32, digest_tokens(IDS), provenance, content).digest}"
    )


def schema() -> list[str]:
    """Return the tables of a knowledge base, as SQLite describes them."""
    with tempfile.TemporaryDirectory() as folder:
        with kvweave.open("notes", home=folder) as base:
            base.store.stats()  # the store makes its tables when it is first used
        connection = sqlite3.connect(Path(folder) / "kb" / "notes" / "catalog.sqlite")
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
        found = [" ".join(row[0].split()) for row in rows]
        connection.close()
    return found


def contents() -> dict[str, tuple[EntryKey, Content]]:
    """Return small entries of every kind."""
    tokens = digest_tokens(IDS[:2])
    made = KVProvenance("isolated", ("s" * 32,))
    kv = torch.arange(32, dtype=torch.float32).reshape(2, 2, 2, 2, 2) / 8 - 2
    entries: dict[str, tuple[KVProvenance, Content]] = {
        "float32": (made, ChunkKV(IDS[:2], kv)),
        "bfloat16": (made, ChunkKV(IDS[:2], kv.to(torch.bfloat16))),
        "note": (
            KVProvenance("digest-12.5", made.context),
            ChunkFeature(IDS[:2], {"scores": kv[0, 0, 0, :, 0]}),
        ),
    }
    for storage in ("int8", "int4"):
        entries[storage] = (quantised(made, storage), ChunkKV(IDS[:2], quantise(kv, storage)))
    return {
        name: (EntryKey("default", "a" * 32, tokens, provenance, _kind(content)), content)
        for name, (provenance, content) in entries.items()
    }


def _kind(content: Content) -> Any:
    return "kv" if isinstance(content, ChunkKV) else "note"


def entry_files() -> dict[str, str]:
    """Return the bytes of those entries on disk, in base 64."""
    return {
        name: base64.b64encode(b"".join(encode_entry(key, "tiny", content, (key.tokens,)))).decode()
        for name, (key, content) in contents().items()
    }


PINNED = {
    "commands": commands,
    "public_names": public_names,
    "settings": settings,
    "entry_keys": entry_keys,
    "schema": schema,
    "entry_files": entry_files,
}


def read(name: str) -> Any:
    """Return the pinned content under a name."""
    return json.loads((FOLDER / f"{name}.json").read_text())


if __name__ == "__main__":
    for name, collect in PINNED.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(collect(), indent=1) + "\n")
