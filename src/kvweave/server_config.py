"""Settings of the server, which `kvweave.config` reads with all others, and the help texts of settings."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_MOST: Final = 2**31  # seconds beyond this are typing errors, and overflow elsewhere


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server, `kvweave serve`.

    Attributes:
        host: Address to listen on. Any but this machine's own (127.0.0.1, ::1, localhost) needs a key.
        port: Port to listen on; 0 takes a free one.
        api_key: Keys that requests must carry as `Authorization: Bearer KEY`, separated by commas. Default: none.
        tenants: TOML file with a table `[tenants]` of `name = "KEY"` or `name = "sha256:HEX"` lines. Each key has knowledge bases of
            its own, under `tenants/name`.
        cors_origins: Origins of web pages that may use the server, separated by commas; * allows any.
        max_running: Most requests computed at once.
        max_queue: Most requests that wait; one more is refused with status 429.
        max_body_bytes: Largest body of a request that is no upload.
        max_upload_bytes: Largest body of an upload.
        max_connections: Most open connections; a new one then replaces the longest idle.
        client_timeout_s: Longest wait for a client that sends or reads too slowly.
        ping_s: Seconds of silence in a stream before a comment line shows that the connection lives.
        grace_s: Seconds that running requests have to finish after SIGTERM.
        async_kv: Load stored KV of a request while others are computed.
        share_kv: Keep one copy in memory of stored KV that several running requests use.
        idle_work: Do background work while no request runs.
        vllm_metrics: Also export metrics under vLLM's names.
    """

    host: str = "127.0.0.1"
    port: int = 8420
    api_key: str | None = None
    tenants: str | None = None
    cors_origins: str | None = None
    max_running: int = 16
    max_queue: int = 64
    max_body_bytes: int = 8_000_000
    max_upload_bytes: int = 600_000_000
    max_connections: int = 1000
    client_timeout_s: float = 20.0
    ping_s: float = 5.0
    grace_s: float = 30.0
    async_kv: bool = True
    share_kv: bool = True
    idle_work: bool = True
    vllm_metrics: bool = False


def split(text: str | None) -> tuple[str, ...]:
    """Return the parts of a comma-separated setting."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def server_bounds(server: ServerConfig) -> Iterator[tuple[bool, str]]:
    """Yield whether each setting's value is valid, and the error message if it is not."""
    yield 0 <= server.port < 2**16, f"port is {server.port}; it must be between 0 (a free one) and 65535"
    yield server.max_queue >= 0, f"max_queue is {server.max_queue}; it cannot be negative (0: none waits)"
    for name in ("max_running", "max_body_bytes", "max_upload_bytes", "max_connections"):
        value = getattr(server, name)
        yield value >= 1, f"{name} is {value}; at least 1 is needed"
    for name in ("client_timeout_s", "ping_s"):
        value = getattr(server, name)
        yield 0 < value < _MOST, f"{name} is {value}; it must be above 0"
    yield 0 <= server.grace_s < _MOST, f"grace_s is {server.grace_s}; it cannot be negative"


def meanings(component: Any) -> dict[str, str]:
    """Return the help text of each setting of a component, on one line, from the component's docstring."""
    _, _, text = (inspect.getdoc(component) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.split("\n\n")[0], re.M)
    return {name: " ".join(meaning.split()) for name, meaning in found}
