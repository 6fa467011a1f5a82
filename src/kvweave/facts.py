"""Turns results into plain dictionaries, for `--json` and for replies over HTTP, and such dictionaries into an answer."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from kvweave.results import (
    Answer,
    AnswerCacheHit,
    DecodeStats,
    ExplainedToken,
    Plan,
    PlanSpan,
    Source,
    Timing,
)

_Made = TypeVar("_Made")


def facts(value: Any) -> Any:
    """Return a result as dictionaries, lists and plain values. A plan includes its token counts."""
    if isinstance(value, Plan):
        counts = [name for name, each in vars(Plan).items() if isinstance(each, property)]
        return {**_fields(value), **{name: getattr(value, name) for name in counts}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _fields(value)
    if isinstance(value, dict):
        return {str(key): facts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [facts(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: facts(getattr(value, field.name)) for field in dataclasses.fields(value)}


def answer_from(stored: Mapping[str, Any]) -> Answer:
    """Return the answer from the dictionaries that `facts` made of it. Raises KeyError or TypeError for any other dictionary."""
    plan, decoding = stored["plan"], stored.get("decoding")
    return dataclasses.replace(
        _made(Answer, stored),
        sources=tuple(_made(Source, each) for each in stored["sources"]),
        plan=dataclasses.replace(
            _made(Plan, plan),
            spans=tuple(_made(PlanSpan, each) for each in plan["spans"]),
            cache_hit=_made(AnswerCacheHit, plan["cache_hit"]) if plan["cache_hit"] else None,
        ),
        timing=_made(Timing, stored["timing"]),
        decoding=_made(DecodeStats, decoding) if decoding else None,
    )


def tokens_from(stored: Iterable[Mapping[str, Any]]) -> tuple[ExplainedToken, ...]:
    """Return explained tokens from the dictionaries that `facts` made of them. Raises as `answer_from`."""
    return tuple(_made(ExplainedToken, each) for each in stored)


def _made(kind: type[_Made], stored: Mapping[str, Any]) -> _Made:
    """Return a dataclass from the entries that are its fields. A newer version of kvweave may have written more entries."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in stored.items() if name in names})
