"""Results as plain dictionaries, for `--json`."""

import dataclasses
from pathlib import Path
from typing import Any

from kvweave.results import Plan


def facts(value: Any) -> Any:
    """A result as dictionaries, lists and plain values; a plan's token counts are written out."""
    if isinstance(value, Plan):
        counts = (
            "prompt_tokens",
            "exact_tokens",
            "reused_tokens",
            "recomputed_tokens",
            "fresh_tokens",
            "reused_share",
        )
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
