"""A cached property that many threads compute once."""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

_adding = threading.Lock()


class once(Generic[T]):  # noqa: N801 - used as a decorator
    """As `functools.cached_property`; of several threads that come first, one computes and the others wait.

    An object's properties may use each other: it has one lock for all of them, which its thread may take again.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> "once[T]": ...
    @overload
    def __get__(self, instance: Any, owner: type[Any]) -> T: ...
    def __get__(self, instance: Any, owner: type[Any]) -> "T | once[T]":
        """Return the value, computed by the first access; later ones find it in the object."""
        if instance is None:
            return self
        values: dict[str, Any] = instance.__dict__
        with _adding:
            lock = values.setdefault("_once", threading.RLock())
        with lock:
            if self._name not in values:
                values[self._name] = self._compute(instance)
            value: T = values[self._name]
            return value
