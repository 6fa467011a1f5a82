"""Whether a running server answers as this process would: the settings that shape an answer are compared.

A setting that a request can carry goes along with it. Any other must be the server's own. Light to import.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvweave.config import Config

IN_REQUEST: Final = (
    "recipe", "prepare", "top_k", "max_new_tokens", "temperature", "top_p", "seed", "think",
)  # fmt: skip
"""Settings that a request for one answer can carry."""

_OF_KNOWLEDGE_BASE: Final = ("model", "dtype", "weights", "embedding_model", "system")
"""Settings whose default is what the knowledge base was made with: the server refuses a knowledge base of another."""

_OF_PROCESS: Final = (
    "auxiliary", "reranker", "storage", "kv_budget", "resident_bytes", "answer_threshold", "answer_limit_bytes", "answer_error_bound",
    "check_answers",
)  # fmt: skip
_OF_MACHINE: Final = ("device", "shared")
"""Settings that say where something is computed or stored: without one, the server's will do."""


def setting_values(config: Config) -> dict[str, Any]:
    """Return all settings by name; `home` is none."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values |= {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        elif field.name != "home":
            values[field.name] = value
    return values


def differences(mine: Mapping[str, Any], servers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that shape an answer and differ from the server's; IN_REQUEST ones can go with a request.

    `mine` and `servers` are settings by name. A server that does not name a setting is of another version: it differs.
    """
    defaults = setting_values(Config(home=Path()))
    differing = {}
    for name in (*IN_REQUEST, *_OF_KNOWLEDGE_BASE, *_OF_PROCESS, *_OF_MACHINE):
        leaves_it = name in (*_OF_KNOWLEDGE_BASE, *_OF_MACHINE) and mine[name] == defaults[name]
        if name not in servers or (mine[name] != servers[name] and not leaves_it):
            differing[name] = mine[name]
    return differing


def cannot_honour(differing: Mapping[str, Any], in_request: tuple[str, ...]) -> str:
    """Return why a server cannot honour settings that differ from its own, or an empty text if it can.

    It can honour those in `in_request`, but not that one is left to its default.
    """
    for name, value in differing.items():
        if name not in in_request or value is None:
            return f"its {name} is another one" if value is None else f"its {name} is not {value!r}"
    return ""
