"""The tenants of a server, their API keys and their folders."""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvweave.config import Config, ServerConfig, split
from kvweave.errors import InvalidRequest, Unauthorized
from kvweave.state.knowledge_base_state import checked_name

MIN_KEY_LENGTH: Final = 8
_HASHED: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")


class Tenants:
    """API keys and the names of their tenants. The name None means the server's own home.

    Only digests of the keys are kept.

    Raises InvalidRequest for a key that is too short, a mistyped digest, or a name that is no folder name.
    """

    def __init__(self, names: Mapping[str, str | None]) -> None:
        self._names: dict[bytes, str | None] = {}
        for key, name in names.items():
            if (digest := _HASHED.fullmatch(key)) and name is not None:
                self._names[bytes.fromhex(digest[1])] = checked_name("tenant", name)
                continue
            if key.lower().startswith("sha256:"):
                # Otherwise a mistyped digest would itself become the key, and the tenant's real key would not work.
                whose = "an API key of the server" if name is None else f"the key of tenant {name!r}"
                raise InvalidRequest(
                    f"{whose} begins with sha256:, as only a digest in the tenants file may; "
                    'write "sha256:" in small letters, then 64 hexadecimal digits'
                )
            if len(key) < MIN_KEY_LENGTH:
                raise InvalidRequest(f"an API key has {len(key)} characters; use at least {MIN_KEY_LENGTH}")
            self._names[_digest(key)] = name if name is None else checked_name("tenant", name)

    def name_of(self, key: str | None) -> str | None:
        """Return the name of a key's tenant, in a time that does not depend on the keys. Raises Unauthorized."""
        given, found = _digest(key or ""), None
        for digest in self._names:
            if hmac.compare_digest(given, digest):
                found = digest
        if found is None:
            raise Unauthorized(
                "the API key is missing or wrong: send a key that the server knows, as "
                "`Authorization: Bearer KEY`"
            )
        return self._names[found]


def read_tenants(path: Path, own_keys: Sequence[str] = ()) -> Tenants:
    """Return the tenants of a TOML file whose table `tenants` gives each name its key, or "sha256:" and the key's digest.

    `own_keys` are the keys of the server's own home.

    Raises InvalidRequest, naming the file, if the file is not of this form.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig")).get("tenants")
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read as TOML: {error}") from error
    if not isinstance(table, dict) or not table or not all(isinstance(key, str) for key in table.values()):
        raise InvalidRequest(
            f'{path} names no tenants; write a table [tenants] with lines such as name = "key"'
        )
    names: dict[str, str | None] = dict.fromkeys(own_keys)
    for name, key in table.items():
        if key in names:
            raise InvalidRequest(f"{path} gives {names[key]!r} and {name!r} the same key; each needs its own")
        names[key] = name
    return Tenants(names)


def tenants_of(server: ServerConfig) -> Tenants | None:
    """Return the tenants that the settings name, or None if any client may use the server. Raises InvalidRequest."""
    keys = split(server.api_key)
    if server.tenants is not None:
        return read_tenants(Path(server.tenants).expanduser(), keys)
    return Tenants(dict.fromkeys(keys)) if keys else None


def tenant_home(config: Config, name: str | None) -> Path:
    """Return the folder with all of a tenant's data."""
    return config.home if name is None else config.home / "tenants" / name


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
