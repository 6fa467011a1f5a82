"""The running server that a command uses instead of loading a model itself, if there is one that answers the same.

Light to import: no model library, no HTTP library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvweave.config import Config
from kvweave.errors import ServerError
from kvweave.server.process.discovery import find_server

if TYPE_CHECKING:
    from kvweave.server.client.client import ServerClient


@dataclass(slots=True)
class ServerChoice:
    """The server that a command uses, or why it uses none.

    Attributes:
        url: of the running server; empty if there is none, or if the command was told not to use it.
        client: connected to it; None if the command runs by itself.
        options: settings of this request that differ from the server's and go with it.
        unused: why the command runs by itself although there is a server.
    """

    url: str = ""
    client: "ServerClient | None" = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unused: str = ""

    @property
    def line(self) -> str:
        """One line for `--explain`, empty without a server."""
        if not self.url:
            return ""
        return f"the server at {self.url} was not used: {self.unused}" if self.unused else (
            f"answered by the server at {self.url}"
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """The same for `--json`."""
        return {"url": self.url, "used": not self.unused} | ({"why": self.unused} if self.unused else {})

    def give_up(self, why: object) -> None:
        """Run by oneself after all."""
        if self.client is not None:
            self.client.close()
        self.client, self.unused = None, str(why)


def choose_server(config: Config, in_request: tuple[str, ...]) -> ServerChoice:
    """Return the running server of the settings' home if it honours them; `in_request` are those that requests carry.

    A tenant's key does not open the server's settings. So no server is used that would answer from other knowledge bases
    than the home's own.
    """
    found = find_server(config.home) if config.use_server else None
    if found is None:
        return ServerChoice()
    choice = ServerChoice(found.url)
    from kvweave.server.client.client import ServerClient

    mine = setting_values(config)
    try:
        choice.client = ServerClient(found.url, next(iter(api_keys(mine)), None))
        differing = _differences(mine, choice.client.settings())
    except ServerError as error:
        choice.give_up(error)
        return choice
    if why := _why_not(differing, in_request):
        choice.give_up(why)
    choice.options = differing
    return choice


def preparing_server(config: Config, kb: str) -> str:
    """Let the running server of the settings' home prepare a knowledge base's chunks; return its address.

    Returns an empty text if there is none, or if it does not: it does no idle work, has another model, or prepares chunks in
    another way.
    """
    choice = choose_server(config, IN_REQUEST)
    if choice.client is None:
        return ""
    with choice.client as client:
        try:
            same = not {"recipe", "prepare"} & choice.options.keys()
            return choice.url if same and client.prepares(kb) else ""
        except ServerError:
            return ""


def api_keys(settings: Mapping[str, Any]) -> list[str]:
    """Return the API keys of the setting, which may name several, separated by commas."""
    keys = str(settings["api_key"] or "").split(",")
    return [key.strip() for key in keys if key.strip()]


IN_REQUEST: Final = (
    "recipe", "prepare", "top_k", "max_new_tokens", "temperature", "top_p", "seed", "think",
)  # fmt: skip
"""Settings that a request for one answer can carry."""

_OF_KNOWLEDGE_BASE: Final = ("model", "dtype", "weights", "embedding_model", "system")
"""Settings whose default is what the knowledge base was made with: the server refuses a knowledge base of another."""

_OF_PROCESS: Final = (
    "auxiliary", "reranker", "storage", "kv_budget", "resident_bytes", "answer_threshold", "answer_limit_bytes",
    "check_answers",
)  # fmt: skip
_OF_MACHINE: Final = ("device", "shared")
"""Settings that say where something is computed or stored: without one, the server's will do."""


def setting_values(config: Config) -> dict[str, Any]:
    """Return all settings by name; `home` is none."""
    values: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            values |= {each.name: getattr(value, each.name) for each in fields(value)}
        elif item.name != "home":
            values[item.name] = value
    return values


def _differences(mine: Mapping[str, Any], servers: Mapping[str, Any]) -> dict[str, Any]:
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


def _why_not(differing: Mapping[str, Any], in_request: tuple[str, ...]) -> str:
    """Return why a server cannot honour settings that differ from its own, or an empty text if it can.

    It can honour those in `in_request`, but not that one is left to its default.
    """
    for name, value in differing.items():
        if name not in in_request or value is None:
            return f"its {name} is another one" if value is None else f"its {name} is not {value!r}"
    return ""
