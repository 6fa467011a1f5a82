"""docs/reference/python.md: each public name with its signature and its description from the docstring."""

import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Unpack, get_origin

from docstrings import entries, prose, sentences

import kvweave
from kvweave import errors
from kvweave.answering.settings import Settings

CAUGHT = ("EntriesInUse", "DamagedEntry", "TierUnavailable")
"""Errors that no caller sees."""
NAMES = {
    "A knowledge base": ("open", "KnowledgeBase", "Answer", "Plan", "Timing"),
    "Your own retriever": (
        "load_model",
        "Adapter",
        "ChunkStore",
        "prepare",
        "Prompt",
        "prefill",
        "generate",
        "OffloadSettings",
    ),
    "Recipes and errors": ("METHODS", "Recipe", "KvweaveError"),
}
RESULTS = ("Answer", "Plan", "Timing")
"""Classes that only kvweave creates; the page shows their fields instead of a signature."""

MEMBERS: dict[str, tuple[str, ...]] = {
    "ChunkStore": ("used_bytes", "set_limit", "stats", "verify", "clear", "attach_device", "close"),
    "KnowledgeBase": (),
}
"""Classes whose members the page shows: the named ones, or all if none is named."""

EXPLAINED: dict[str, tuple[str, ...]] = {
    "KnowledgeBase.stream": ("drop_chunks", "cache"),
    "load_model": ("name",),
    "prepare": ("system", "embedding"),
    "prefill": ("kv",),
    "generate": ("kv", "settings"),
    "OffloadSettings": ("folder",),
}
"""Parameters that the page explains, because their names do not."""

ABBREVIATED = {"ask": "ask(question, ...)"}
"""Calls shown without their parameters, because their text refers to another method with the same ones."""


def python_api(generated: str) -> list[str]:
    lines = [
        "# Python",
        "",
        generated,
        "",
        "Import all names from `kvweave`. `help(kvweave.prefill)` has more about parameters and errors. A parameter with the name of a",
        "[setting](settings.md) has the meaning of the setting. The [guide](../guide/recipes.md#how-much-to-recompute) explains `ratio` and",
        "`coverage`.",
    ]
    assert sorted(name for names in NAMES.values() for name in names) == kvweave.__all__
    for title, names in NAMES.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", f"### {name}", "", *_described(name, getattr(kvweave, name))]
    return lines


def _described(name: str, documented: Any) -> list[str]:
    said = prose(documented)[0] if name in MEMBERS else sentences(" ".join(prose(documented)), 2)
    if name == "METHODS":
        return ["Maps the name of each recipe to the function that makes it; see [recipes](recipes.md)."]
    if name == "KvweaveError":
        return [said, "", *_error_list()]
    if name in RESULTS:
        return [said, "", *_fields(documented)]
    listed = [*_explained(name, documented), *(_members(name, documented) if name in MEMBERS else ())]
    called = _signature(name, documented) if name != "KnowledgeBase" else []  # `open` makes it
    return [*called, said, *(["", *listed] if listed else [])]


def _error_list(error: type[Exception] = errors.KvweaveError, indent: str = "") -> list[str]:
    """Return the classes below an error as a nested list, without those that kvweave catches itself."""
    lines = []
    for each in error.__subclasses__():
        if each.__module__ == errors.__name__ and each.__name__ not in CAUGHT:
            lines += [f"{indent}- `{each.__name__}`: {prose(each)[0]}", *_error_list(each, f"{indent}  ")]
    return lines


def _explained(name: str, documented: Any, indent: str = "") -> list[str]:
    said = entries(documented, "Args")
    return [f"{indent}- `{each}`: {sentences(said[each], 2)}" for each in EXPLAINED.get(name, ())]


def _members(name: str, documented: Any) -> list[str]:
    """Return a list of the properties, then of the methods with their parameters."""
    public = _public(documented)
    lines = []
    for member in sorted(MEMBERS[name] or public, key=lambda each: inspect.isfunction(public[each])):
        called = ABBREVIATED.get(member) or _call(member, public[member])
        lines.append(f"- `{called}`: {prose(public[member])[0]}")
        lines += _explained(f"{name}.{member}", public[member], indent="  ")
    return lines


def _fields(documented: Any) -> list[str]:
    """Return the fields of a result, as a list with explanations if the docstring has them."""
    names = [field.name for field in dataclasses.fields(documented)]
    said = entries(documented, "Attributes")
    if not said:
        return [f"Fields: {', '.join(f'`{name}`' for name in names)}."]
    properties = {name: prose(each)[0] for name, each in _public(documented).items()}
    return [f"- `{name}`: {text}" for name, text in (said | properties).items()]


def _public(documented: Any) -> dict[str, Any]:
    """Return the public methods and properties of a class, those of kvweave's base classes first."""
    bases = [base for base in reversed(documented.__mro__) if base.__module__.startswith("kvweave")]
    members = {name: each for base in bases for name, each in vars(base).items() if not name.startswith("_")}
    return {
        name: each for name, each in members.items() if inspect.isfunction(each) or isinstance(each, property)
    }


def _signature(name: str, function: Callable[..., Any]) -> list[str]:
    lines = textwrap.wrap(_call(name, function), 100, subsequent_indent="    ", break_on_hyphens=False)
    return ["```python", *lines, "```", ""]


def _call(name: str, documented: Any) -> str:
    """Return the call of a function with parameters and defaults, or the name of a property."""
    if isinstance(documented, property):
        return name
    given = inspect.signature(documented).parameters.values()
    parameters = [own for each in given if each.name != "self" for own in _unpacked(each)]
    shown = [_parameter(each) for each in parameters]
    named = [n for n, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY]
    if named and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        shown.insert(named[0], "*")
    return f"{name}({', '.join(shown)})"


def _unpacked(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The options of a question, with their defaults, in place of `**options`."""
    if get_origin(parameter.annotation) is not Unpack:
        return [parameter]
    completed = inspect.signature(Settings.options).parameters.values()
    return [each for each in completed if each.kind is each.KEYWORD_ONLY]


def _parameter(parameter: Any) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    if parameter.default is parameter.empty:
        return f"{star}{parameter.name}"
    shown = repr(parameter.default)
    default = "..." if callable(parameter.default) or shown.startswith("<") else shown.replace("'", '"')
    return f"{parameter.name}={default}"
