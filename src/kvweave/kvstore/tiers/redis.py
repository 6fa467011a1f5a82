"""The shared tier on a server that speaks Redis's protocol: Redis, Valkey, KeyDB and others.

Each entry is a string. A set holds the keys of the namespace, since a server often serves other programs too and has no
folders. An entry that the server evicts or lets expire is a miss.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

from kvweave.errors import InvalidRequest, TierUnavailable
from kvweave.extras import require
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.tiers.tier import Blob

if TYPE_CHECKING:
    from redis import Redis

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
CONNECT_WITHIN_S = 2.0
ANSWER_WITHIN_S = 10.0  # for each part of an answer, not for all of it
_BATCH = 1000
_T = TypeVar("_T")


class RedisTier:
    """Entries of one namespace on one server; see `RemoteTier`. `get_many`, `get_ranges` and `has_many` take one round trip each.

    Args:
        url: redis://[user:password@]host:port/database, rediss:// with TLS, unix:///path; valkey:// is the same as redis://.
        namespace: shared by the knowledge bases that share entries.

    Raises:
        MissingExtra: the package redis is not installed.
        InvalidRequest: not such a URL.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self._client = _client(url)
        # In braces, so that all keys of a namespace are on one node of a cluster.
        self._prefix = f"kvweave:{{{quote(namespace, safe='')}}}:"
        self._index = f"{self._prefix}keys"
        self.location = _without_password(url)

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        with self._translated_errors():
            values = self._client.mget([self._prefix + key for key in keys]) if keys else []
            return {key: value for key, value in zip(keys, values, strict=True) if isinstance(value, bytes)}

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
        with self._translated_errors(), self._client.pipeline(transaction=False) as pipe:
            for begin, end in ranges:
                pipe.getrange(self._prefix + key, begin, end - 1)
            parts: list[Blob] = [*_all(bytes, pipe.execute(), len(ranges))]
        return parts if any(parts) else None  # no entry is empty

    def put(self, key: str, data: Blob) -> None:
        with self._translated_errors(), self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._prefix + key, memoryview(data))
            pipe.sadd(self._index, key)
            pipe.execute()

    def delete(self, keys: Iterable[str]) -> None:
        """Delete entries; the server frees their memory in the background."""
        for some in _batches(list(keys)):
            with self._translated_errors(), self._client.pipeline(transaction=True) as pipe:
                pipe.unlink(*(self._prefix + key for key in some))
                pipe.srem(self._index, *some)
                pipe.execute()

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        return frozenset(key for key, size in self._lengths(keys) if size)

    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of the set's entries; remove from the set those that the server has evicted."""
        found: dict[str, int] = {}
        with self._translated_errors():
            keys = sorted(key.decode() for key in self._client.sscan_iter(self._index, count=_BATCH))
        for some in _batches(keys):
            found.update(self._lengths(some))
        gone = [key for key, size in found.items() if not size]
        self.delete(gone)
        return {key: size for key, size in found.items() if size}

    def close(self) -> None:
        self._client.close()

    def _lengths(self, keys: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Return each entry's length, 0 if it is not there: no entry is empty."""
        with self._translated_errors(), self._client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.strlen(self._prefix + key)
            lengths = _all(int, pipe.execute() if keys else [], len(keys))
        return zip(keys, lengths, strict=True)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise TierUnavailable for what the server refuses, and for answers that are none.

        What is left of such an answer must not become the next one's beginning, so that connections are closed.
        """
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            if not isinstance(error, RedisError | OSError):
                self._client.connection_pool.disconnect()
            raise TierUnavailable(f"{self.location} does not do what is asked ({error})") from error


def _all(kind: type[_T], values: object, count: int) -> list[_T]:
    """Return the values of an answer if it has `count` of this kind; raise ValueError for another answer."""
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(each, kind) for each in values)
    ):
        raise ValueError(f"an answer of {count} values of kind {kind.__name__} is something else")
    return values


def _client(url: str) -> "Redis":
    require("redis", "a shared tier on Redis", "redis")
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        return Redis.from_url(
            url.replace("valkey", "redis", 1) if url.startswith("valkey") else url,
            socket_connect_timeout=CONNECT_WITHIN_S,
            socket_timeout=ANSWER_WITHIN_S,
            retry=Retry(NoBackoff(), 0),  # the circuit breaker decides about retries
        )
    except ValueError as error:
        raise InvalidRequest(
            f"{_without_password(url)!r} is no address of a Redis server: {error}"
        ) from error


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH))
