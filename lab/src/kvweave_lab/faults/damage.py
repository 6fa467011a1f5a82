"""Files of a home that are altered, cut, swapped, emptied, lost or replaced by older ones: nothing damaged is used.

A knowledge base may refuse what is damaged, with an error that says what to do. Who does that has everything back.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from kvweave.errors import KvweaveError
from kvweave_lab.faults import shim
from kvweave_lab.faults.checks import Broken, Checker, must
from kvweave_lab.faults.crashes import in_fork, run
from kvweave_lab.faults.disk import Disk, Loss
from kvweave_lab.faults.workload import Step, draw

WAYS: Final = ("bit flipped", "bytes zeroed", "cut", "emptied", "lost", "grown", "swapped", "older")
_PARTS: Final = {"kv": "entry", "vectors": "index", "conversations": "conversation"}
_MOST_FILES: Final = 4
_ATTEMPTS: Final = 4


def check_all(
    root: Path, steps: int, rounds: int, random: Random, report: Callable[[str, str, str], None]
) -> None:
    """Make a home at `root` by a drawn workload, then damage and check it `rounds` times.

    `report` gets for each damaged file the part of the home and the way, and, with the last one, what broke and how.
    """
    shutil.rmtree(root, ignore_errors=True)
    (root / "documents").mkdir(parents=True)
    plan = [
        Step("limit", limit_bytes=10**9),
        *draw(random, steps),
        Step("add", "a", 50),
        Step("chat", question="the mill?"),
    ]
    older = dict[Path, bytes]()
    with shim.recording(root, Path(os.devnull)):
        for part in (plan[: len(plan) // 2], plan[len(plan) // 2 :]):
            older = older or _contents(root / "home")
            must(not os.waitpid(in_fork(lambda: run(root, part)), 0)[1], "a step without faults succeeds")  # noqa: B023
            older = older or _contents(root / "home")
        disk = Disk(root)

        def check() -> None:
            checker = Checker(root)
            for _ in range(rounds):
                disk.leave(root, Loss.NOTHING, random)
                done = [_damage(root / "home", older, random) for _ in range(random.randint(1, _MOST_FILES))]
                broken = detail = ""
                try:
                    survive(checker, root)
                except Broken as found:
                    broken, detail = found.invariant, str(found.detail)
                for number, (part, way, _) in enumerate(done, 1):
                    last = number == len(done)
                    report(
                        f"{part} {way}",
                        broken if last else "",
                        f"{done}: {detail}" if broken and last else "",
                    )

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
            must("\n" not in str(error), "an error has one line", str(error))
            must(
                _followed(root / "home" / "kb" / "notes", str(error)), "an error says what to do", str(error)
            )
    raise Broken("who does what errors say has everything back", said)


def _followed(folder: Path, advice: str) -> bool:
    """Do what an error tells the user to do; return False if it tells nothing."""
    if "vectors" in advice and ("delete" in advice or "move it away" in advice):
        shutil.rmtree(folder / "vectors", ignore_errors=True)
    elif "move it away" in advice:
        for path in folder.glob("catalog.sqlite*"):
            path.unlink()
    elif "begin another conversation" in advice or "delete it" in advice:
        shutil.rmtree(folder / "conversations")
    else:
        return "add" in advice or "again" in advice
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
    content = bytearray(path.read_bytes())
    at = random.randrange(len(content))
    match way:
        case "bit flipped":
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
            other = random.choice(by_part[part])
            swapped = other.read_bytes()
            other.write_bytes(content)
            content = bytearray(swapped)
        case "older":
            content = bytearray(older.get(path, b""))
    path.unlink() if way == "lost" else path.write_bytes(content)
    return part, way, path.name


def _part(path: Path) -> str:
    return next((name for folder, name in _PARTS.items() if folder in path.parts), "catalogue")
