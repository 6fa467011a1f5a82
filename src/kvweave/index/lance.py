"""Imports lancedb in a third of the usual time; nothing else is in this file.

lancedb imports a REST client whose hundreds of methods pydantic wraps with a check of their arguments. Making the checks takes
most of the time, and kvweave calls none of these methods. So each check is made when its method is first called.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pydantic
import typing_extensions

_validate_call = pydantic.validate_call


def _validated_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks its arguments as `pydantic.validate_call` does."""

    @functools.cache
    def checked() -> Callable[..., Any]:
        return _validate_call(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return checked()(*args, **kwargs)

    return call


pydantic.validate_call = _validated_when_called  # type: ignore[assignment]
if sys.version_info < (3, 12):  # later versions use typing's decorator, which checks nothing either
    import overrides

    _override = overrides.override
    overrides.override = typing_extensions.override  # type: ignore[assignment]
try:
    import lancedb
    from lancedb.index import FTS
    from lancedb.query import MatchQuery
finally:
    pydantic.validate_call = _validate_call
    if sys.version_info < (3, 12):
        overrides.override = _override

__all__ = ["FTS", "MatchQuery", "lancedb"]
