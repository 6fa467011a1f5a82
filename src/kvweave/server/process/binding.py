"""Where the server may listen, and who has a key for it."""

from pathlib import Path
from typing import Final

from kvweave.errors import InvalidRequest
from kvweave.server.serving.tenants import Tenants, read_tenants
from kvweave.server_config import ServerConfig

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def split(text: str | None) -> tuple[str, ...]:
    """Return what a setting lists, separated by commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def tenants_of(server: ServerConfig) -> Tenants | None:
    """Return who may use the server, as its settings say; None for any client. Raises InvalidRequest."""
    keys = split(server.api_key)
    if server.tenants is not None:
        return read_tenants(Path(server.tenants).expanduser(), keys)
    return Tenants(dict.fromkeys(keys)) if keys else None


def check_binding(server: ServerConfig) -> None:
    """Raise InvalidRequest if other machines could use the server without a key."""
    if server.host not in LOOPBACK and not split(server.api_key) and server.tenants is None:
        raise InvalidRequest(
            f"host is {server.host!r}, which other machines can reach: give --api-key or --tenants, or listen on 127.0.0.1"
        )
