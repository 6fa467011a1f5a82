"""How much memory the system lets this process have, its page cache included: the limit of its control group, on Linux."""

from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NONE_FROM = 2**60
"""The first version of control groups says "no limit" with a number about as large as there are."""


def memory_limit_bytes(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """The smallest limit of the process's group and of those around it; None where none is set or nobody can tell.

    `root` is where control groups are mounted, `own` says which the process is in.
    """
    limits: list[int] = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += _limits(root, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min((limit for limit in limits if limit < _NONE_FROM), default=None)


def _limits(base: Path, path: str, file: str) -> list[int]:
    found = []
    folder = base / path.lstrip("/")
    while folder.is_relative_to(base):
        with suppress(OSError, ValueError):  # the outermost group has none; "max" is none either
            found.append(int((folder / file).read_text()))
        if folder == base:
            break
        folder = folder.parent
    return found
