"""The shared tier on a server that speaks Redis's protocol: Redis, Valkey, KeyDB and others.

An entry is a string; beside them a set names those of the namespace, since a server is often shared with others and has no
folders. What the server itself evicts or lets expire is simply not there any more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from kvweave.errors import InvalidRequest, MissingExtra, TierUnavailable
from kvweave.kvstore.tiers.tier import Blob, Range

if TYPE_CHECKING:
    from redis import Redis

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
CONNECT_WITHIN_S = 2.0
ANSWER_WITHIN_S = 10.0  # for each piece of an answer, not for all of it
_AT_ONCE = 1000


class RedisTier:
    """Entries of one namespace on one server; see `RemoteTier`.

    Args:
        url: redis://[user:password@]host:port/database, rediss:// with TLS, unix:///path; valkey:// is the same as redis://.
        namespace: what the knowledge bases that share entries have in common.

    Raises:
        MissingExtra: the package redis is not installed.
        InvalidRequest: not such a URL.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self._client = _client(url)
        # In braces, so that all keys of a namespace lie on one node of a cluster.
        self._prefix = f"kvweave:{{{quote(namespace, safe='')}}}:"
        self._names = f"{self._prefix}keys"
        self.place = _without_password(url)

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        """One round trip."""
        with self._explained():
            values = self._client.mget([self._prefix + key for key in keys]) if keys else []
        return {key: value for key, value in zip(keys, values, strict=True) if isinstance(value, bytes)}

    def get_ranges(self, key: str, ranges: Sequence[Range]) -> list[Blob] | None:
        """One round trip."""
        with self._explained(), self._client.pipeline(transaction=False) as pipe:
            for begin, end in ranges:
                pipe.getrange(self._prefix + key, begin, end - 1)
            parts = pipe.execute()
        return parts if any(parts) else None  # no entry is empty

    def put(self, key: str, data: Blob) -> None:
        """The entry and its name in one transaction."""
        with self._explained(), self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._prefix + key, data)
            pipe.sadd(self._names, key)
            pipe.execute()

    def delete(self, keys: Iterable[str]) -> None:
        """Freed by the server in the background."""
        for some in _batches(list(keys)):
            with self._explained(), self._client.pipeline(transaction=True) as pipe:
                pipe.unlink(*(self._prefix + key for key in some))
                pipe.srem(self._names, *some)
                pipe.execute()

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        """One round trip."""
        return frozenset(key for key, size in self._lengths(keys) if size)

    def sizes(self) -> Mapping[str, int]:
        """By the set of names, out of which those are taken that the server has let go of."""
        found: dict[str, int] = {}
        with self._explained():
            names = sorted(name.decode() for name in self._client.sscan_iter(self._names, count=_AT_ONCE))
        for some in _batches(names):
            found.update(self._lengths(some))
        gone = [key for key, size in found.items() if not size]
        self.delete(gone)
        return {key: size for key, size in found.items() if size}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _lengths(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        """0 for those that are not there: no entry is empty."""
        with self._explained(), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.strlen(self._prefix + key)
            lengths = pipe.execute() if keys else []
        return zip(keys, lengths, strict=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as error:
            raise TierUnavailable(f"{self.place} does not do what is asked ({error})") from error


def _client(url: str) -> "Redis":
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise MissingExtra("a shared tier on Redis needs an extra: pip install 'kvweave[redis]'") from error
    try:
        return Redis.from_url(
            url.replace("valkey", "redis", 1) if url.startswith("valkey") else url,
            socket_connect_timeout=CONNECT_WITHIN_S,
            socket_timeout=ANSWER_WITHIN_S,
            retry=Retry(NoBackoff(), 0),  # whether to try again is decided elsewhere
        )
    except ValueError as error:
        raise InvalidRequest(
            f"{_without_password(url)!r} is no address of a Redis server: {error}"
        ) from error


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + _AT_ONCE] for start in range(0, len(keys), _AT_ONCE))
