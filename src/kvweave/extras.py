"""Names the command that installs what is missing."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from kvweave.errors import MissingExtra

KNOWLEDGE_BASE: Final = ("lancedb", "pyarrow", "semantic_text_splitter", "Stemmer")
"""Modules of the extra `kb` that nothing else brings."""


def require(extra: str, what: str, *modules: str) -> None:
    """Check that the modules of an extra are installed, without importing them.

    Args:
        extra: the extra of kvweave that brings the modules.
        what: what needs them, as the subject of the message.
        modules: top-level names.

    Raises MissingExtra, which names the first missing module and the command that installs the extra.
    """
    missing = next((name for name in modules if find_spec(name) is None), None)
    if missing is not None:
        raise MissingExtra(f"{what} needs {missing}, which is not installed: pip install 'kvweave[{extra}]'")


def load(extra: str, what: str, module: str) -> Any:
    """Return an imported module of an extra; raises MissingExtra as `require`, also if the import fails."""
    require(extra, what, module)
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{what} needs {module}, which cannot be imported ({error}): pip install 'kvweave[{extra}]'"
        ) from error
