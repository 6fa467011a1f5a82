"""Real documentation of the installed packages, among which the benchmark's documents have to be found.

Pages are found where they are: the long description of each distribution, its .md, .rst and .txt files, and the docstrings
of the modules of a few libraries. Nothing is copied into the project, so that another machine may have other pages; their
digest is part of a run's configuration.
"""

import ast
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final

import xxhash

from kvweave.errors import InvalidRequest

PAGES: Final = 500
LONGEST_CHARS: Final = 8_000
SHORTEST_CHARS: Final = 800

_SUFFIXES: Final = frozenset({".md", ".rst", ".txt"})
_NOT_PROSE: Final = re.compile(
    r"licen[sc]e|copying|notice|authors|requirements|top_level|entry_points|sources|record|/tests?/|/data/",
    re.IGNORECASE,
)
_LETTERS: Final = 0.65
"""The least share of letters and spaces in a page: tables, word lists and dumps of numbers have fewer."""

_LARGEST_BYTES: Final = 1_000_000
_DOCUMENTED: Final = ("numpy", "torch")
"""The packages whose docstrings are pages, beside the standard library's."""

_OWN: Final = "kvweave"


@dataclass(frozen=True, slots=True)
class Page:
    """One page: a name that says where it comes from, and its text."""

    name: str
    text: str


@cache
def installed_pages(count: int = PAGES) -> tuple[Page, ...]:
    """Return `count` pages of documentation, always the same ones on a machine that does not change. Read once per process.

    Written pages come before docstrings. Within each of the two, the digest of a page's name decides, so that every
    package has a share. Raises InvalidRequest if there are fewer.
    """
    pages: dict[str, Page] = {}
    for source in (_written(), _documented()):
        for name, read in sorted(source, key=lambda each: _digest(each[0])):
            if len(pages) >= count:
                break
            page = _page(name, read())
            if page is not None:
                pages.setdefault(_digest(page.text), page)
    if len(pages) < count:
        raise InvalidRequest(
            f"only {len(pages)} pages of documentation are installed; ask for fewer with --distractors"
        )
    return tuple(pages.values())


_Source = tuple[str, Callable[[], str]]
"""A page's name, and what reads its text."""


def _written() -> Iterator[_Source]:
    """Yield the long description of each distribution, and its text files that are no licences or lists."""
    for distribution in distributions():
        name = distribution.metadata["Name"] or "unnamed"
        if name.startswith(_OWN):
            continue
        yield f"{name}/METADATA", partial(_description, distribution)
        for file in distribution.files or ():
            if file.suffix in _SUFFIXES and not _NOT_PROSE.search(f"/{file}"):
                yield f"{name}/{file}", partial(_read, Path(str(file.locate())))


def _description(distribution: Distribution) -> str:
    metadata = distribution.metadata
    if "Description" in metadata:
        return metadata["Description"]
    payload = distribution.read_text("METADATA") or ""
    return payload.partition("\n\n")[2]


def _documented() -> Iterator[_Source]:
    """Yield modules, whose page is their docstring and those of their classes and functions, each after its name."""
    folders = [("python", Path(sysconfig.get_path("stdlib")))]
    for package in _DOCUMENTED:
        spec = find_spec(package)
        places = spec.submodule_search_locations if spec is not None else None
        folders += [(package, Path(folder)) for folder in places or ()]
    for package, folder in folders:
        for path in folder.rglob("*.py"):
            inside = path.relative_to(folder).as_posix()
            if not _NOT_PROSE.search(f"/{inside}") and "site-packages" not in inside:
                yield f"{package}/{inside}", partial(_docstrings, path)


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(_read(path))
    except (SyntaxError, ValueError, RecursionError):
        return ""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    named = [(node.name, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, documented)]
    parts = (f"{name}\n{text}" for name, text in named if text)
    return "\n\n".join(chain([ast.get_docstring(tree) or ""], parts))


def _page(name: str, text: str) -> Page | None:
    """Return the beginning of a text as a page, if it is long enough and prose."""
    text = _beginning(text.strip())
    letters = sum(character.isalpha() or character.isspace() for character in text)
    prose = len(text) >= SHORTEST_CHARS and letters >= _LETTERS * len(text)
    return Page(name, text) if prose else None


def _beginning(text: str) -> str:
    """Return at most LONGEST_CHARS of a text, up to the end of a paragraph or line."""
    if len(text) <= LONGEST_CHARS:
        return text
    ends = (text.rfind(mark, LONGEST_CHARS // 2, LONGEST_CHARS) for mark in ("\n\n", "\n", " "))
    return text[: next((end for end in ends if end > 0), LONGEST_CHARS)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.stat().st_size <= _LARGEST_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def pages_digest(pages: Iterable[Page]) -> str:
    """Name a list of pages: other pages, or another order, give another digest."""
    return _digest("\0".join(f"{page.name}\0{page.text}" for page in pages))
