"""The running server that a command uses instead of loading a model itself.

A server of the command's home is used if it has every setting that the command was given and that shapes an answer. What a request
can carry goes with it, and what was not given is the server's. Light to import: no model library, no HTTP library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvweave.config import Config, all_settings, split
from kvweave.errors import ServerError
from kvweave.server.process.discovery import find_server

if TYPE_CHECKING:
    from kvweave.server.client import ServerClient

IN_REQUEST: Final = (
    "recipe", "prepare", "top_k", "max_new_tokens", "temperature", "top_p", "seed", "think", "kv_budget",
)  # fmt: skip
"""Settings that a request for one answer can carry."""
_SHAPING: Final = (
    *("recipe", "prepare", "system", "storage", "shared"),
    *("model", "embedding", "retrieval", "answers", "generation", "decoding"),
)
"""The settings that shape an answer: some by name, and all of some components."""


@dataclass(slots=True)
class ServerChoice:
    """The server that a command uses, or why it uses none.

    Attributes:
        url: of the running server; empty if there is none, or if the command was told not to use it.
        client: connected to it; None if the command answers by itself.
        options: settings of this command that differ from the server's and go with its requests.
        unused: why the command answers by itself although there is a server.
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
        """Fall back to answering in this process."""
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
    from kvweave.server.client import ServerClient

    try:
        choice.client = ServerClient(found.url, next(iter(split(config.server.api_key)), None))
        servers = choice.client.settings()
    except ServerError as error:
        choice.give_up(error)
        return choice
    shaping = [
        each
        for each in all_settings().values()
        if (each.part in _SHAPING or each.name in _SHAPING) and each.name != "engine_key"  # shapes no answer
    ]
    differing = {each: mine for each in shaping if servers.get(each.name) != (mine := each.value(config))}
    carried = {each for each, mine in differing.items() if each.name in in_request and mine is not None}
    choice.options = {each.name: mine for each, mine in differing.items() if each in carried}
    refused = [each for each, mine in differing.items() if each not in carried and mine != each.default]
    if refused:
        choice.give_up(f"its {refused[0].name} is not {differing[refused[0]]!r}")
    return choice


def preparing_server(config: Config, kb: str) -> str:
    """Let the running server of the settings' home prepare a knowledge base's chunks; return its address.

    Returns an empty text if there is none, or if it does not: it does no idle work, has another model, or prepares chunks with
    other settings.
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
