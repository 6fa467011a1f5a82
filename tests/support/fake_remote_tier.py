"""A remote tier in the test's own memory, which a test can make refuse, wait or fail."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvweave.errors import TierUnavailable
from kvweave.kvstore.header import ByteRange
from kvweave.kvstore.tiers.tier import Blob


class FakeRemoteTier:
    """Keeps everything. Each call first calls `before` with its name and keys, which may raise TierUnavailable or wait."""

    location = "memory of the test"

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.before: Callable[[str, Sequence[str]], None] = lambda call, keys: None
        self.calls: list[str] = []

    def get_many(self, keys: Sequence[str]) -> Mapping[str, Blob]:
        self._called("get_many", keys)
        return {key: self.held[key] for key in keys if key in self.held}

    def get_ranges(self, key: str, ranges: Sequence[ByteRange]) -> list[Blob] | None:
        self._called("get_ranges", [key])
        data = self.held.get(key)
        return None if data is None else [data[begin:end] for begin, end in ranges]

    def put(self, key: str, data: Blob) -> None:
        self._called("put", [key])
        self.held[key] = bytes(data)

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._called("delete", keys)
        for key in keys:
            self.held.pop(key, None)

    def has_many(self, keys: Sequence[str]) -> frozenset[str]:
        self._called("has_many", keys)
        return frozenset(self.held) & frozenset(keys)

    def sizes(self) -> Mapping[str, int]:
        found = {key: len(data) for key, data in self.held.items()}
        self._called("sizes", [])
        return found

    def close(self) -> None:
        self.calls.append("close")

    def _called(self, call: str, keys: Sequence[str]) -> None:
        self.before(call, keys)
        self.calls.append(call)


def refusing(*calls: str, keys: Sequence[str] | None = None) -> Callable[[str, Sequence[str]], None]:
    """A `before` that refuses these calls, for these keys alone if any are given."""

    def before(call: str, given: Sequence[str]) -> None:
        if call in calls and (keys is None or set(keys) & set(given)):
            raise TierUnavailable(f"{call} is refused")

    return before
