"""Every phrase of the tasks, found in their modules."""

import importlib
import pkgutil
import re
from collections.abc import Iterator, Mapping
from functools import cache
from string import Formatter

from kvweave_lab.eval import tasks
from kvweave_lab.eval.tasks import needles
from kvweave_lab.eval.world import SPLITS, Phrases

TASK_MODULES = tuple(
    importlib.import_module(f"{tasks.__name__}.{found.name}")
    for found in pkgutil.iter_modules(tasks.__path__)
)


def all_phrases() -> dict[str, Phrases]:
    """Return every Phrases object in a task's module, at any depth, by a name that says where it is."""
    named: dict[int, tuple[str, Phrases]] = {}
    for module in (needles, *TASK_MODULES):  # `needles` first: other tasks import its phrases
        for name, value in vars(module).items():
            if not name.startswith("__"):
                for where, phrases in _within(f"{module.__name__.rpartition('.')[2]}.{name}", value):
                    named.setdefault(id(phrases), (where, phrases))
    return dict(named.values())


def placeholders(sentence: str) -> frozenset[str]:
    """Return the names in braces."""
    return frozenset(name for _, name, _, _ in Formatter().parse(sentence) if name is not None)


def normalised(sentence: str) -> str:
    """Return a sentence in lower case, words only, with equal placeholders."""
    return " ".join(re.findall(r"\w+|{}", re.sub(r"{\w+}", "{}", sentence).lower()))


@cache
def pattern(sentence: str) -> re.Pattern[str]:
    """Return a pattern of a sentence with its placeholders filled; groups are named after the placeholders."""
    parts: list[str] = []
    seen: set[str] = set()
    for text, name, _, _ in Formatter().parse(sentence):
        parts.append(re.escape(text))
        if name is not None:
            parts.append(f"(?i:(?P={name}))" if name in seen else f"(?P<{name}>{_FILLED.get(name, _WORD)})")
            seen.add(name)
    return re.compile(r"(?<!\S)" + "".join(parts) + r"(?!\S)")


_WORD = r"[\w-]+"
_ATTRIBUTES = "|".join((*needles.NUMBERS, *needles.IDENTIFIERS, *needles.WORDS))
_FILLED = {"a": f"(?:{_ATTRIBUTES})", "w": r"[a-z, ]+"}


def _within(name: str, value: object) -> Iterator[tuple[str, Phrases]]:
    if isinstance(value, Mapping):
        if value.keys() & set(SPLITS):
            yield name, value
        else:
            for key, inner in value.items():
                yield from _within(f"{name}.{key}", inner)
    elif isinstance(value, tuple | list):
        fields = getattr(value, "_fields", range(len(value)))
        for key, inner in zip(fields, value, strict=True):
            yield from _within(f"{name}.{key}", inner)
