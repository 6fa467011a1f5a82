"""The running server that a command uses instead of loading a model itself, if there is one that answers the same.

Light to import: no model library, no HTTP library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvweave.errors import ServerError
from kvweave.server.process.discovery import find_server

if TYPE_CHECKING:
    from kvweave.config import Config
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


def choose_server(config: "Config", in_request: tuple[str, ...]) -> ServerChoice:
    """Return the running server of the settings' home if it honours them; `in_request` are those that requests carry.

    A tenant's key does not open the server's settings. So no server is used that would answer from other knowledge bases
    than the home's own.
    """
    found = find_server(config.home) if config.use_server else None
    if found is None:
        return ServerChoice()
    choice = ServerChoice(found.url)
    from kvweave.server.client.client import ServerClient
    from kvweave.server.client.settings_match import cannot_honour, differences, setting_values

    mine = setting_values(config)
    try:
        choice.client = ServerClient(found.url, next(iter(api_keys(mine)), None))
        differing = differences(mine, choice.client.settings())
    except ServerError as error:
        choice.give_up(error)
        return choice
    if why := cannot_honour(differing, in_request):
        choice.give_up(why)
    choice.options = differing
    return choice


def preparing_server(config: "Config", kb: str) -> str:
    """Let the running server of the settings' home prepare a knowledge base's chunks; return its address.

    Returns an empty text if there is none, or if it does not: it does no idle work, has another model, or prepares chunks in
    another way.
    """
    from kvweave.server.client.settings_match import IN_REQUEST

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
