"""Names the command that installs what is missing."""

from importlib import import_module
from importlib.util import find_spec
from typing import Final

from kvweave.errors import MissingExtra

_KNOWLEDGE_BASE: Final = (
    "lancedb",
    "pyarrow",
    "semantic_text_splitter",
    "Stemmer",
    "selectolax",
    "chardetng_py",
)
"""Modules of the extra `kb` that nothing else brings."""


def require(extra: str, what: str, *modules: str) -> None:
    """Import the modules of an extra.

    Args:
        extra: the extra of kvweave that brings the modules.
        what: what needs them, as the subject of the message.
        modules: names of modules.

    Raises MissingExtra, which names the first module that cannot be imported and the command that installs the extra.
    """
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            raise _missing(extra, what, name, "is not installed") from error
        except ImportError as error:
            raise _missing(extra, what, name, f"cannot be imported ({error})") from error


def require_knowledge_base(extra: str, what: str) -> None:
    """Check that the libraries of knowledge bases are there, without the seconds of importing them; raises as `require`."""
    for name in _KNOWLEDGE_BASE:
        if find_spec(name) is None:
            raise _missing(extra, what, name, "is not installed")


def _missing(extra: str, what: str, module: str, why: str) -> MissingExtra:
    return MissingExtra(f"{what} needs {module}, which {why}: pip install 'kvweave[{extra}]'")
