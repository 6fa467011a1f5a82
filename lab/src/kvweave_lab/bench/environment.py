"""The environment of a measurement: command, version, commit, date, machine and memory limit."""

import datetime
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import kvweave

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NONE_FROM = 2**60
"""Version 1 of control groups encodes "no limit" as a number of about this size."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What is recorded with every measurement.

    Attributes:
        command: repeats the measurement when pasted into a shell.
        version: of kvweave.
        commit: of the checkout that ran; empty for an installed package.
        date: ISO 8601.
        machine: processor architecture, the widest vector instructions that torch uses, and matrix units if present.
        threads: number of threads that torch computes with.
    """

    command: str
    version: str
    commit: str
    date: str
    machine: str
    threads: int


def current_environment(command: str) -> Environment:
    """Return the environment of this process."""
    return Environment(
        command=command,
        version=kvweave.__version__,
        commit=_commit(),
        date=datetime.date.today().isoformat(),
        machine=_machine(),
        threads=torch.get_num_threads(),
    )


def _machine() -> str:
    units = [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    return ", ".join([*units, "AMX"] if torch.cpu._is_amx_tile_supported() else units)


def _commit() -> str:
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=9"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else ""


def memory_limit_bytes(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Return the smallest memory limit of the process's control group and its parents, page cache included.

    None where no limit is set or none can be read, as outside Linux. `root` is the mount point of control groups,
    `own` the file that names the process's groups.
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
        with suppress(OSError, ValueError):  # the root group has no file; "max" means no limit
            found.append(int((folder / file).read_text()))
        if folder == base:
            break
        folder = folder.parent
    return found
