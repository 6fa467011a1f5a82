"""Imports lancedb in half the usual time; nothing else is in this file.

lancedb imports the data classes of a package that is a REST client too. The package's `__init__.py` imports all of the client,
which takes most of the time and which kvweave never uses. So that file runs when something is asked for that it defines.
"""

import functools
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

import typing_extensions


def _import_without_init(name: str) -> None:
    """Import a package whose `__init__.py` runs when an attribute is asked for that no import of a part has set.

    Without effect if the package is imported already, or is not there.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__getattr__ = functools.partial(_run_init, package, threading.RLock(), [])  # type: ignore[method-assign]
    sys.modules[name] = package


def _run_init(package: ModuleType, lock: threading.RLock, begun: list[bool], attribute: str) -> Any:
    with lock:
        if not begun:
            begun.append(True)
            package.__spec__.loader.exec_module(package)  # type: ignore[union-attr]
        if attribute in vars(package):
            return vars(package)[attribute]
    raise AttributeError(f"module {package.__name__!r} has no attribute {attribute!r}")


_import_without_init("lance_namespace_urllib3_client")
if sys.version_info < (3, 12):  # later versions use typing's decorator, which checks nothing either
    import overrides

    _override = overrides.override
    overrides.override = typing_extensions.override  # type: ignore[assignment]
try:
    import lancedb
    from lancedb.index import FTS
    from lancedb.query import MatchQuery
finally:
    if sys.version_info < (3, 12):
        overrides.override = _override

__all__ = ["FTS", "MatchQuery", "lancedb"]
