"""Parts of a docstring, each on one line: the prose, the entries of a section, the first sentences."""

import inspect
import re
from typing import Any


def prose(documented: Any) -> list[str]:
    """Return the paragraphs before the first section such as `Args:`, without their sentences on errors."""
    text = re.split(r"^[A-Z]\w+:\n", inspect.getdoc(documented) or "", maxsplit=1, flags=re.M)[0]
    return [re.sub(r" Raises [A-Z].*", "", " ".join(each.split())) for each in text.strip().split("\n\n")]


def entries(documented: Any, section: str) -> dict[str, str]:
    """Return the entries of a section (`Args`, `Attributes`) by name."""
    _, _, text = (inspect.getdoc(documented) or "").partition(f"{section}:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.split("\n\n")[0], re.M)
    return {name: " ".join(said.split()) for name, said in found}


def sentences(text: str, count: int) -> str:
    """Return the first sentences of a text."""
    return " ".join(re.split(r"(?<=\.) (?=[A-Z`\"])", text)[:count])


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def cell(text: str | None) -> str:
    """Return a text as the cell of a table."""
    return one_line(text).replace("|", "\\|")
