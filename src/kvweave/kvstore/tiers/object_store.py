"""The shared tier on an object store: S3 and what speaks like it, Google's, Azure's, or a folder that machines share.

Each entry is an object under the namespace's prefix; objects appear whole. Address and credentials come from the URL and
the variables that the store's own tools use (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kvweave.errors import InvalidRequest, TierUnavailable
from kvweave.extras import require
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.tiers.tier import Blob

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CONNECT_WITHIN = timedelta(seconds=2)
ANSWER_WITHIN = timedelta(seconds=60)
RETRY_WITHIN = timedelta(seconds=3)
CONCURRENT_REQUESTS = 8

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ObjectTier:
    """Entries of one namespace in one bucket or folder; see `RemoteTier`.

    Args:
        url: s3://bucket/prefix, gs://…, az://…, file:///folder, or any other URL that obstore supports.
        namespace: shared by the knowledge bases that share entries.

    Raises:
        MissingExtra: the package obstore is not installed.
        InvalidRequest: not such a URL.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self._store = _open(url)
        import obstore.exceptions

        self._obstore = obstore
        self._folder = namespace if _PLAIN.fullmatch(namespace) else f"ns-{_digest(namespace)}"
        self._threads = ThreadPoolExecutor(CONCURRENT_REQUESTS, "kvweave-objects")
        self.location = url

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        """Return entries; one request each, several at a time."""
        found = self._threads.map(self._get, keys) if len(keys) > 1 else map(self._get, keys)
        return {key: data for key, data in zip(keys, found, strict=True) if data is not None}

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
        """Return parts of an entry; one request per range, several at a time.

        Not by obstore.get_ranges, which panics if a range lies beyond the end of a truncated object.
        """
        some = [partial(self._part, key, *each) for each in ranges]
        parts = list(self._threads.map(lambda part: part(), some)) if len(some) > 1 else [some[0]()]
        return None if None in parts else [part for part in parts if part is not None]

    def put(self, key: str, data: Blob) -> None:
        """Store an entry; large ones are sent in parts, and appear when the last part has arrived."""
        with self._translated_errors():
            self._obstore.put(self._store, self._path(key), data)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete entries, many per request if the store supports that."""
        paths = [self._path(key) for key in keys]
        if not paths:
            return
        with self._translated_errors():
            try:
                self._obstore.delete(self._store, paths)
            except FileNotFoundError:
                # Some stores report one missing object, and not what became of the others.
                for path in paths:
                    with suppress(FileNotFoundError):
                        self._obstore.delete(self._store, path)

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        """Return which entries are there; one request each, several at a time."""
        found = self._threads.map(self._has, keys) if len(keys) > 1 else map(self._has, keys)
        return frozenset(key for key, there in zip(keys, found, strict=True) if there)

    def sizes(self) -> Mapping[str, int]:
        """List the entries: one request per thousand."""
        found: dict[str, int] = {}
        with self._translated_errors():
            for some in self._obstore.list(self._store, prefix=self._folder):
                found.update((each["path"].rpartition("/")[2], each["size"]) for each in some)
        return found

    def close(self) -> None:
        self._threads.shutdown()

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key}"

    def _get(self, key: str) -> Blob | None:
        with self._translated_errors():
            try:
                return memoryview(self._obstore.get(self._store, self._path(key)).bytes())
            except FileNotFoundError:
                return None

    def _part(self, key: str, begin: int, end: int) -> Blob | None:
        path = self._path(key)
        with self._translated_errors():
            try:
                try:
                    return memoryview(
                        self._obstore.get(self._store, path, options={"range": (begin, end)}).bytes()
                    )
                except self._obstore.exceptions.BaseError as error:
                    # A store that does not answer at all is not asked a second time.
                    if (
                        "range" not in _first_line(error).lower()
                        or begin < self._obstore.head(self._store, path)["size"]
                    ):
                        raise
                    return b""  # the range lies beyond the end, which is no failure of the store
            except FileNotFoundError:
                return None

    def _has(self, key: str) -> bool:
        with self._translated_errors():
            try:
                self._obstore.head(self._store, self._path(key))
            except FileNotFoundError:
                return False
        return True

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise TierUnavailable(f"{self.location} is not there ({_first_line(error)})") from error
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise TierUnavailable(
                f"{self.location} does not do what is asked ({_first_line(error)})"
            ) from error


def _open(url: str) -> "ObjectStore":
    require("s3", "a shared tier on an object store", "obstore")
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    options: dict[str, Any] = {
        # The endpoint's address, which users set on purpose, says whether to encrypt.
        "client_options": {"connect_timeout": CONNECT_WITHIN, "timeout": ANSWER_WITHIN, "allow_http": True},
        "retry_config": {"max_retries": 2, "retry_timeout": RETRY_WITHIN},
    }
    if url.startswith("file:"):
        options = {"mkdir": True}
    try:
        return from_url(url, **options)
    except (BaseError, ValueError, OSError) as error:
        raise InvalidRequest(f"{url!r} is no address of an object store ({_first_line(error)})") from error


def _digest(namespace: str) -> str:
    return blake2b(namespace.encode(), digest_size=16).hexdigest()


def _first_line(error: Exception) -> str:
    """Return the message without the debugging text that obstore adds."""
    return str(error).partition("\n")[0]
