"""A shared tier that fails, lies, delays, answers twice and forgets: nothing wrong is used, nobody has to notice, and all comes back.

Three kinds of tier: Redis and an S3 server behind a relay that spoils answers on their way, and a folder as an object store. In all of
them the entries themselves are altered, too.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.tiers import object_store
from kvweave.kvstore.tiers import redis as redis_tier
from kvweave_lab.faults.checks import broken_in, must
from kvweave_lab.faults.damage import MODEL, Report, Stored, is_right, stored_entries

if TYPE_CHECKING:
    from obstore.store import ObjectStore
    from redis import Redis

WIRE: Final = (
    "connection closed",
    "answer cut",
    "answer late",
    "answer twice",
    "answer altered",
    "no answer",
)
"""What a relay does to some answers."""
HELD: Final = ("forgotten", "altered", "cut", "swapped", "emptied")
"""What happens to some of the entries that a tier holds."""
_SPOILED: Final = 0.3  # of answers, and of entries
_LATE_S: Final = 0.3
_ANSWER_WITHIN_S: Final = (
    1.0  # in place of the product's ten or sixty: the campaign waits for each one that never comes
)
_LONGEST_S: Final = 30.0
_PASSES: Final = 3
_START_WITHIN_S: Final = 30.0


def check_all(root: Path, rounds: int, random: Random, report: Report) -> None:
    """Share KV in a tier, spoil it `rounds` times, look up and store meanwhile, and see that everything comes back.

    `report` gets for each round the tier and the way, and what broke.
    """
    redis_tier.ANSWER_WITHIN_S = _ANSWER_WITHIN_S
    object_store.ANSWER_WITHIN = timedelta(seconds=_ANSWER_WITHIN_S)
    stored = list(stored_entries())
    with ExitStack() as opened:
        root.mkdir(parents=True, exist_ok=True)
        tiers: list[Tier] = [Folder(root / "folder")]
        if program := shutil.which("redis-server") or shutil.which("valkey-server"):
            tiers.append(opened.enter_context(_redis(program, root / "redis")))
        if all(map(importlib.util.find_spec, ("moto", "flask"))):
            tiers.append(opened.enter_context(_s3()))
        for number in range(rounds):
            tier = tiers[number % len(tiers)]
            way = random.choice(tier.ways)
            folder = root / str(number)
            broken, detail = broken_in(lambda: _spoiled(tier, way, folder, stored, random))  # noqa: B023
            report(f"{tier.name}: {way}", broken, detail)
            shutil.rmtree(folder, ignore_errors=True)


def _spoiled(tier: "Tier", way: str, folder: Path, stored: list[Stored], random: Random) -> None:
    """Share what is stored, spoil it while two machines use it, and let others find it afterwards; raise Broken if they cannot."""
    namespace = f"history-{random.getrandbits(64):x}"

    @contextmanager
    def machine(name: str, *, relayed: bool = False) -> Iterator[ChunkStore]:
        with ChunkStore(folder / name, namespace=namespace, shared=tier.address(relayed=relayed)) as store:
            yield store

    with machine("first") as first:
        _put(first, stored)
        _wait_until_shared(first)
    began = time.monotonic()
    with tier.spoiled(way, random), machine("second", relayed=True) as second:
        for content, made in stored:
            must(is_right(second, content, made), "nothing wrong is used", content.token_ids)
        _put(second, stored)
        for content, made in stored:
            must(is_right(second, content, made), "nothing wrong is used", content.token_ids)
    must(
        time.monotonic() - began < _LONGEST_S,
        "a tier that fails does not hold anybody up",
        time.monotonic() - began,
    )
    missing = list(stored)
    for number in range(_PASSES):
        with machine(f"reader-{number}") as reader:
            missing = [each for each in stored if not is_right(reader, *each, found=True)]
        if not missing:
            return
        with machine(f"writer-{number}") as writer:
            _put(writer, stored)
            _wait_until_shared(writer)
    must(False, "what was stored again is shared again", [content.token_ids for content, _ in missing])


def _put(store: ChunkStore, stored: list[Stored]) -> None:
    for content, made in stored:
        store.put(MODEL, content, made, [digest_tokens(content.token_ids)])


def _wait_until_shared(store: ChunkStore) -> None:
    ends = time.monotonic() + _LONGEST_S
    while (waiting := store.stats().by_tier["shared"].waiting) and time.monotonic() < ends:
        time.sleep(0.01)
    must(not waiting, "a sound tier gets everything", waiting)


class Tier(ABC):
    """A shared tier; `relay` is what stands before it, if anything does."""

    name: str
    relay: "Relay | None" = None

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways in which it can be spoiled."""
        return HELD if self.relay is None else (*WIRE, *HELD)

    @contextmanager
    def spoiled(self, way: str, random: Random) -> Iterator[None]:
        """Spoil the tier once, or its answers for as long as the context lasts."""
        if self.relay is not None and way in WIRE:
            with self.relay.spoiling(way, random):
                yield
            return
        held = self.names()
        for name in held:
            if random.random() < _SPOILED or name == held[0]:
                self.write(name, _altered(way, self.read(name), self.read(random.choice(held)), random))
        yield

    @abstractmethod
    def address(self, *, relayed: bool) -> str:
        """Return its URL, through the relay or directly."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the entries."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return an entry."""

    @abstractmethod
    def write(self, name: str, data: bytes | None) -> None:
        """Replace an entry; None deletes it."""


def _altered(way: str, data: bytes, other: bytes, random: Random) -> bytes | None:
    """Return what becomes of an entry; `other` is another one."""
    content = bytearray(data)
    match way:
        case "forgotten":
            return None
        case "altered" if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        case "cut":
            del content[random.randrange(len(content) + 1) :]
        case "swapped":
            return other
        case "emptied":
            content.clear()
    return bytes(content)


class Folder(Tier):
    """A folder as an object store."""

    name = "folder"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def address(self, *, relayed: bool) -> str:
        """Return the folder's URL."""
        return f"file://{self._folder}"

    def names(self) -> list[str]:
        """Return the files, as paths."""
        return sorted(str(path) for path in self._folder.rglob("*") if path.is_file())

    def read(self, name: str) -> bytes:
        """Return a file's content; of one that is gone, nothing."""
        with suppress(FileNotFoundError):
            return Path(name).read_bytes()
        return b""

    def write(self, name: str, data: bytes | None) -> None:
        """Write or delete a file."""
        if data is None:
            Path(name).unlink(missing_ok=True)
        else:
            Path(name).write_bytes(data)


class RedisServer(Tier):
    """A Redis server, and a relay in front of it."""

    name = "redis"

    def __init__(self, client: "Redis", port: int, relay: "Relay") -> None:
        self._client, self._port, self.relay = client, port, relay

    def address(self, *, relayed: bool) -> str:
        """Return the server's or the relay's URL."""
        return f"redis://127.0.0.1:{self.relay.port if relayed and self.relay else self._port}/0"

    def names(self) -> list[str]:
        """Return the keys of strings."""
        return sorted(key.decode() for key in self._client.scan_iter(_type="string"))

    def read(self, name: str) -> bytes:
        """Return a string."""
        found = self._client.get(name)
        return found if isinstance(found, bytes) else b""

    def write(self, name: str, data: bytes | None) -> None:
        """Set or delete a string."""
        if data is None:
            self._client.delete(name)
        else:
            self._client.set(name, data)


@contextmanager
def _redis(program: str, folder: Path) -> Iterator[RedisServer]:
    from redis import Redis
    from redis.exceptions import RedisError

    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    words = ("--port", port, "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no")
    process = subprocess.Popen([program, *map(str, words)], stdout=subprocess.DEVNULL)
    try:
        client, ends = Redis(port=port), time.monotonic() + _START_WITHIN_S
        while True:
            try:
                client.ping()
                break
            except RedisError:
                must(time.monotonic() < ends, "the Redis server starts")
                time.sleep(0.02)
        with client, Relay(port) as relay:
            yield RedisServer(client, port, relay)
    finally:
        process.kill()
        process.wait()


class ObjectServer(Tier):
    """An S3 server with one bucket, and a relay in front of it. Its address is in a variable, as for all tools of S3."""

    name = "s3"

    def __init__(self, port: int, relay: "Relay") -> None:
        from obstore.store import from_url

        self._port, self.relay = port, relay
        url = self.address(relayed=False)
        self._store: ObjectStore = from_url(url, client_options={"allow_http": True})

    def address(self, *, relayed: bool) -> str:
        """Set the variable to the server's or the relay's address, and return the URL."""
        port = self.relay.port if relayed and self.relay else self._port
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        return f"s3://{_BUCKET}"

    def names(self) -> list[str]:
        """Return the paths of objects."""
        return sorted(each["path"] for some in self._store.list() for each in some)

    def read(self, name: str) -> bytes:
        """Return an object's content; of one that is gone, nothing."""
        with suppress(FileNotFoundError):
            return bytes(self._store.get(name).bytes())
        return b""

    def write(self, name: str, data: bytes | None) -> None:
        """Put or delete an object."""
        if data is None:
            self._store.delete(name)
        else:
            self._store.put(name, data)


_BUCKET: Final = "campaign"


@contextmanager
def _s3() -> Iterator[ObjectServer]:
    credentials = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    os.environ.update(credentials)
    port = _free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + _START_WITHIN_S
        while True:
            try:
                request = urllib.request.Request(f"http://127.0.0.1:{port}/{_BUCKET}", method="PUT")
                with urllib.request.urlopen(request, timeout=_START_WITHIN_S):
                    break
            except OSError:
                must(time.monotonic() < ends, "the S3 server starts")
                time.sleep(0.1)
        with Relay(port) as relay:
            yield ObjectServer(port, relay)
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Relay:
    """Relays connections to a server of this machine, and does to some of its answers what `spoiling` says."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._way, self._random, self._guard = "", Random(0), threading.Lock()
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> "Relay":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    @contextmanager
    def spoiling(self, way: str, random: Random) -> Iterator[None]:
        """Spoil some answers in this way until the context ends."""
        with self._guard:
            self._way, self._random = way, Random(random.getrandbits(64))
        try:
            yield
        finally:
            with self._guard:
                self._way = ""

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            for source, target, change in ((near, far, lambda data: data), (far, near, self._spoiled)):
                threading.Thread(target=_pump, args=(source, target, change), daemon=True).start()

    def _spoiled(self, data: bytes) -> bytes | None:
        """Return what is sent in place of a piece of an answer; None closes the connection."""
        with self._guard:
            way, random = self._way, self._random
            if not way or random.random() > _SPOILED:
                return data
            at, bit = random.randrange(len(data)), 1 << random.randrange(8)
        match way:
            case "connection closed":
                return None
            case "answer cut":
                return data[:at]
            case "answer late":
                time.sleep(_LATE_S)
            case "answer twice":
                return data * 2
            case "answer altered":
                return data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
            case "no answer":
                return b""
        return data


def _pump(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes | None]) -> None:
    """Send to `target` what comes from `source`, changed, until either ends."""
    with suppress(OSError), source, target:
        while data := source.recv(1 << 16):
            sent = change(data)
            if sent is None:
                return
            target.sendall(sent)
