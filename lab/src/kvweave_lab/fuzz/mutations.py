"""Seeded changes of files: of any bytes, of JSON values, and of the parts of a zip archive."""

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import Any, Final

_EXTREMES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_MOST_REPEATED_BYTES: Final = 1 << 17

OUTSIDE: Final = (
    "../outside",
    "/outside",
    "../../etc/passwd",
    "/etc/passwd",
    "~/outside",
    "file:///etc/passwd",
)
"""Names of files that a reader must not open."""

_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "\x00", "\ud800", "a" * 10_000, "9" * 5_000, "{{ 1 }}", [], {}, [[]], [None], {"": None}),
    *OUTSIDE,
)


def mutated(rng: Random, data: bytes, words: Sequence[bytes] = (), others: Sequence[bytes] = ()) -> bytes:
    """Return a file with one to eight changes; `words` mean something in the format, `others` are files to splice with."""
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4, 8))):
        data = rng.choice(_CHANGES)(rng, data, words, others)
    return data


_Change = Callable[[Random, bytes, Sequence[bytes], Sequence[bytes]], bytes]


def _flip(rng: Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) or 1)
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))] if data else b"") + data[at + 1 :]


def _number(rng: Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    """Write an extreme number in place of one, as bytes or in digits."""
    at, value = rng.randrange(len(data) or 1), rng.choice(_EXTREMES)
    if rng.random() < 0.4:
        start = next((n for n in range(at, len(data)) if data[n : n + 1].isdigit()), at)
        end = next((n for n in range(start, len(data)) if not data[n : n + 1].isdigit()), len(data))
        return data[:start] + str(rng.choice((value, -value, value * 10**9))).encode() + data[end:]
    width = rng.choice((1, 2, 4, 8))
    number = (value & ((1 << 8 * width) - 1)).to_bytes(width, rng.choice(("little", "big")))
    return data[:at] + number + data[at + width :]


def _cut(rng: Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] if rng.random() < 0.3 else data[:start] + data[start + rng.randrange(1, 200) :]


def _repeat(rng: Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    """Repeat a piece, often many times: depth and number are what readers forget to bound."""
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.choice((1, 4, 16, 64, 1024))]
    if words and rng.random() < 0.5:
        piece = rng.choice(words)
    times = min(rng.choice((2, 8, 100, 2_000, 50_000)), _MOST_REPEATED_BYTES // (len(piece) or 1))
    return data[:start] + piece * times + data[start:]


def _insert(rng: Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    new = rng.choice(words) if words and rng.random() < 0.7 else rng.randbytes(rng.choice((1, 2, 8, 100)))
    return data[:at] + new + data[at:]


def _splice(rng: Random, data: bytes, words: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    other = rng.choice(others) if others else data
    start = rng.randrange(len(other) + 1)
    return data[: rng.randrange(len(data) + 1)] + other[start : start + rng.randrange(1, 5_000)]


_CHANGES: Final[tuple[_Change, ...]] = (
    _flip,
    _flip,
    _number,
    _number,
    _cut,
    _repeat,
    _insert,
    _insert,
    _splice,
)


def mutated_json(rng: Random, value: Any) -> bytes:
    """Return a value as JSON with one to three of its parts replaced, removed, doubled or nested deeply."""
    root = [json.loads(json.dumps(value))]
    for _ in range(rng.choice((1, 1, 2, 3))):
        place: Any = root
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = rng.choice(list(keys)) if keys else None
            inner = place[key] if key is not None else None
            if not isinstance(inner, dict | list) or not inner or rng.random() < 0.25:
                break
            place = inner
        _change_part(rng, place, key)
    text = json.dumps(root[0]).encode()
    if rng.random() < 0.05:  # deeper than a parser's stack
        depth = rng.choice((500, 5_000, 100_000))
        text = text.replace(b"null", b"[" * depth + b"]" * depth, 1)
    return text


def _change_part(rng: Random, place: Any, key: Any) -> None:
    way, new = rng.random(), deepcopy(rng.choice(_VALUES))  # a later change may be made in it
    if key is None or way < 0.1:
        place.append(new) if isinstance(place, list) else place.update(
            {rng.choice(("auto_map", "x", "")): new}
        )
    elif way < 0.2 and isinstance(place, dict):
        del place[key]
    elif way < 0.3 and isinstance(place[key], int | float) and not isinstance(place[key], bool):
        place[key] = place[key] * rng.choice((-1, 2, 1000, 10**6, 0.5))
    elif way < 0.35 and isinstance(place[key], list):
        place[key] = place[key] * rng.choice((2, 100))
    else:
        place[key] = new


def mutated_zip(rng: Random, parts: Mapping[str, bytes], words: Sequence[bytes] = ()) -> bytes:
    """Return an archive of these parts with one part or name changed, sometimes a bomb, sometimes damaged itself."""
    parts = dict(parts)
    name = rng.choice(list(parts))
    way = rng.random()
    if way < 0.7:
        parts[name] = mutated(rng, parts[name], words, list(parts.values()))
    elif way < 0.8:
        parts[rng.choice(OUTSIDE)] = parts.pop(name)
    elif way < 0.85:
        del parts[name]
    elif way < 0.87:
        parts[name] = parts[name] + rng.choice((b"\0", b" ", b"<a>")) * (64 << 20)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for each, data in parts.items():
            entry = zipfile.ZipInfo(each)
            entry.compress_type = archive.compression
            if way > 0.97:
                entry.external_attr = 0o120777 << 16  # a symbolic link
            archive.writestr(entry, data, compresslevel=1)
    packed = buffer.getvalue()
    return mutated(rng, packed) if rng.random() < 0.2 else packed
