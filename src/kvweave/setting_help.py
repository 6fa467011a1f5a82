"""What each setting means, for people: read from the docstrings of `kvweave.config`."""

import inspect
import re
from typing import Any


def meanings(component: Any) -> dict[str, str]:
    """Return what a component's docstring says about each setting, on one line."""
    _, _, text = (inspect.getdoc(component) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.split("\n\n")[0], re.M)
    return {name: " ".join(said.split()) for name, said in found}
