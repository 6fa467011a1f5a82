"""Files of a home that are altered, cut, swapped, emptied, lost or replaced by older ones: nothing damaged is used.

A knowledge base may refuse what is damaged, with an error that says what to do. Who does that has everything back.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import torch

from kvweave.errors import DamagedEntry, KvweaveError
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.tiers.disk import SUFFIX
from kvweave.ops.quantise import quantise
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint, Storage
from kvweave_lab.faults import shim
from kvweave_lab.faults.checks import Broken, Checker, broken_in, must
from kvweave_lab.faults.crashes import in_fork, run
from kvweave_lab.faults.disk import Disk, Loss
from kvweave_lab.faults.homes import open_home
from kvweave_lab.faults.workload import Step, draw

Stored = tuple[ChunkKV | ChunkFeature, KVProvenance]
Report = Callable[[str, str, str], None]
"""Gets a fault, the invariant that it broke (empty if none), and where and how."""

WAYS: Final = ("bit flipped", "bytes zeroed", "cut", "emptied", "lost", "grown", "swapped", "older")
_PARTS: Final = {"kv": "entry", "vectors": "index", "conversations": "conversation"}
_MOST_FILES: Final = 4
_ATTEMPTS: Final = 5
SYSTEM: Final = ("5" * 32,)
MODEL: Final = ModelFingerprint("tiny", "weights", "tokenizer", "rope", "float32", "a" * 32)


def check_all(root: Path, steps: int, rounds: int, random: Random, report: Report) -> None:
    """Make a home at `root` by a drawn workload, then damage and check it `rounds` times.

    `report` gets for each damaged file the part of the home and the way, and with the last one what broke and how.
    """
    shutil.rmtree(root, ignore_errors=True)
    (root / "documents").mkdir(parents=True)
    end = [Step("add", "a", 50), Step("chat", question="is the mill old")]
    plan = [Step("limit", limit_bytes=10**9), *draw(random, steps), *end]
    older = dict[Path, bytes]()
    with shim.recording(root, Path(os.devnull)):
        for part in (plan[: len(plan) // 2], plan[len(plan) // 2 :]):
            must(not os.waitpid(in_fork(partial(run, root, part)), 0)[1], "a step without faults succeeds")
            older = older or _contents(root / "home")
        disk = Disk(root)

        def check() -> None:
            checker = Checker(root)
            for _ in range(rounds):
                disk.leave(root, Loss.NOTHING, random)
                done = [_damage(root / "home", older, random) for _ in range(random.randint(1, _MOST_FILES))]
                broken, detail = broken_in(partial(survive, checker, root))
                for part, way, _ in done[:-1]:
                    report(f"{part} {way}", "", "")
                part, way, _ = done[-1]
                report(f"{part} {way}", broken, f"{done}: {detail}" if broken else "")

        must(not os.waitpid(in_fork(check), 0)[1], "the check ends")


def survive(checker: Checker, root: Path) -> None:
    """Use a damaged home as it is, then do what its errors say until everything is back; raise Broken otherwise."""
    said = list[str]()
    for attempt in range(_ATTEMPTS):
        try:
            checker.use(damaged=not attempt)
            return
        except (KvweaveError, OSError) as error:
            said.append(str(error))
        must("\n" not in said[-1], "an error has one line", said[-1])
        try:
            must(_followed(root, said[-1]), "an error says what to do", said[-1])
        except (KvweaveError, OSError) as error:
            said.append(f"while doing that: {error}")
            must(_followed(root, str(error)), "an error says what to do", said[-1])
    raise Broken("who does what errors say has everything back", said)


def check_entries(root: Path, rounds: int, random: Random, report: Report) -> None:
    """Store KV in every storage and a feature at `root`, then damage every file, look all up and verify, `rounds` times.

    `report` is as for `check_all`, once for each file.
    """
    stored = list(stored_entries())
    with ChunkStore(root) as store:
        for content, provenance in stored:
            store.put(MODEL, content, provenance, [digest_tokens(content.token_ids)])
    older, disk = _contents(root), Disk(root)
    for _ in range(rounds):
        disk.leave(root, Loss.NOTHING, random)
        files = sorted(root.rglob(f"*{SUFFIX}"))
        ways = [random.choice(WAYS[:-1]) for _ in files]
        for path, way in zip(files, ways, strict=True):
            _damage_file(path, way, files, older, random)
        with ChunkStore(root) as store:
            wrong = [content.token_ids for content, made in stored if not is_right(store, content, made)]
            store.verify()
            sound = store.verify().sound
        broken = (
            "nothing damaged is used" if wrong else "" if sound else "what was verified and dropped is gone"
        )
        for way in ways[:-1]:
            report(f"entry file {way}", "", "")
        report(f"entry file {ways[-1]}", broken, f"{ways}: {wrong}" if broken else "")


def stored_entries() -> Iterator[Stored]:
    """Yield KV in every storage, and a feature, with their provenances."""
    bits: tuple[Storage, ...] = ("int8", "int4")
    tensors = [torch.randn(2, 2, 1, 8, 4, generator=torch.Generator().manual_seed(each)) for each in range(4)]
    ids = [tuple(range(100 * each, 100 * each + 8)) for each in range(4)]
    yield ChunkKV(ids[0], tensors[0]), KVProvenance("isolated", SYSTEM)
    for number, storage in enumerate(bits, 1):
        kind = KVProvenance(f"isolated-{storage}", SYSTEM, exact=False)
        yield ChunkKV(ids[number], quantise(tensors[number], storage)), kind
    yield ChunkFeature(ids[3], {"moved": tensors[3]}), KVProvenance("digest-12", SYSTEM, exact=False)


def is_right(
    store: ChunkStore, content: ChunkKV | ChunkFeature, made: KVProvenance, *, found: bool = False
) -> bool:
    """Return whether a look-up finds what was stored, or nothing, unless it is to be `found`."""
    try:
        if isinstance(content, ChunkFeature):
            (feature,) = store.find_features(MODEL, [(content.token_ids, made)])
            return (
                not found
                if feature is None
                else torch.equal(feature.tensors["moved"], content.tensors["moved"])
            )
        entry = store.get(MODEL, content.token_ids, made)
        return not found if entry is None else torch.equal(entry.kv, content.kv)
    except DamagedEntry:  # found by the first use of a layer
        return not found


def _followed(root: Path, advice: str) -> bool:
    """Do what an error tells the user to do; return False if it tells nothing."""
    folder = root / "home" / "kb" / "notes"
    if "vectors" in advice and ("delete" in advice or "move it away" in advice):
        shutil.rmtree(folder / "vectors", ignore_errors=True)
    elif "move it away" in advice:
        for path in folder.glob("catalog.sqlite*"):
            path.unlink()
    elif "begin another conversation" in advice or "delete it" in advice:
        shutil.rmtree(folder / "conversations")
    elif "again" not in advice:
        return False
    if "add" in advice:
        with open_home(root / "home") as base:
            base.add(root / "documents", allow_empty=True)
    return True


def _contents(home: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}


def _damage(home: Path, older: dict[Path, bytes], random: Random) -> tuple[str, str, str]:
    """Damage one file; return the part of the home that it belongs to, how, and its name."""
    by_part = defaultdict[str, list[Path]](list)
    for path in sorted(each for each in home.rglob("*") if each.is_file() and each.stat().st_size):
        by_part[_part(path)].append(path)
    part = random.choice(sorted(by_part))
    path, way = random.choice(by_part[part]), random.choice(WAYS)
    _damage_file(path, way, by_part[part], older, random)
    return part, way, path.name


def _damage_file(
    path: Path, way: str, others: Sequence[Path], older: dict[Path, bytes], random: Random
) -> None:
    content = bytearray(path.read_bytes())
    at = random.randrange(max(1, len(content)))
    match way:
        case "bit flipped" if content:
            content[at] ^= 1 << random.randrange(8)
        case "bytes zeroed":
            content[at : at + 512] = bytes(len(content[at : at + 512]))
        case "cut":
            del content[at:]
        case "emptied":
            content.clear()
        case "grown":
            content += random.randbytes(random.randint(1, 600))
        case "swapped":
            other = random.choice([each for each in others if each.exists()])
            swapped = other.read_bytes()
            other.write_bytes(content)
            content = bytearray(swapped)
        case "older":
            content = bytearray(older.get(path, b""))
    if way == "lost":
        path.unlink()
    else:
        path.write_bytes(content)


def _part(path: Path) -> str:
    return next((name for folder, name in _PARTS.items() if folder in path.parts), "catalogue")
