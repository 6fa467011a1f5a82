"""What this process may use of the machine: cores, and memory. Both can be less than the machine has.

A container's limits are in control groups, of version 1 or 2, its own and its parents'. Affinity (`taskset`, Slurm,
Kubernetes' static policy) limits cores too. Loads no other part of kvweave, and no PyTorch.
"""

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT_FROM = 2**60
"""Version 1 of control groups encodes "no limit" as a number of about this size."""

_MALLOC: Final = {
    "MALLOC_ARENA_MAX": (-8, 2),
    "MALLOC_MMAP_THRESHOLD_": (-3, 4 << 20),
    "MALLOC_TRIM_THRESHOLD_": (-1, 64 << 20),
}
"""glibc's settings: the environment variable, the number of the same option for `mallopt`, and its value."""


@dataclass(frozen=True, slots=True)
class CpuLimits:
    """The cores that this process may use.

    Attributes:
        cores: logical cores that the process may run on.
        quota: processor seconds per second that its control groups allow; None without a limit.
    """

    cores: int
    quota: float | None

    @property
    def threads(self) -> int:
        """The most threads that run at the same time without being throttled, at least 1.

        Part of a core counts as none: threads that wait for each other are as slow as the one that is throttled.
        """
        return self.cores if self.quota is None else max(1, min(self.cores, math.floor(self.quota)))


def cpu_limits(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> CpuLimits:
    """Return the cores of this process's affinity, and the smallest quota of its control group and its parents.

    `root` is the mount point of control groups, `own` the file that names the process's groups.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quotas: list[float] = []
    for version, folder in _groups("cpu", root, own):
        with suppress(
            OSError, ValueError, ZeroDivisionError
        ):  # the root group has no file; "max" is no number
            if version == 2:
                allowed, period = (folder / "cpu.max").read_text().split()
            else:
                allowed = (folder / "cpu.cfs_quota_us").read_text()  # -1 is no limit
                period = (folder / "cpu.cfs_period_us").read_text()
            if int(allowed) > 0:
                quotas.append(int(allowed) / int(period))
    return CpuLimits(cores, min(quotas, default=None))


def memory_limit_bytes(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int | None:
    """Return the smallest memory limit of the process's control group and its parents, page cache included.

    None where no limit is set or none can be read, as outside Linux.
    """
    return min((limit for limit, _ in _memory_groups(root, own)), default=None)


def available_memory_bytes(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Return the memory that this process can still take without swapping.

    The machine's, or less if one of the process's control groups has a limit. Page cache that a group can drop counts as
    free.
    """
    left = [limit - in_use for limit, in_use in _memory_groups(root, own)]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def _memory_groups(root: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of every group that has a limit."""
    for version, folder in _groups("memory", root, own):
        limit_file, use_file, cached = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())
            if limit >= _NO_LIMIT_FROM:
                continue
            in_use = 0
            with suppress(OSError, ValueError):
                in_use = int((folder / use_file).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                in_use -= next((int(line.split()[1]) for line in lines if line.split()[0] == cached), 0)
            yield limit, max(0, in_use)


def _groups(controller: str, root: Path, own: Path) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of the process's groups of a controller, each followed by its parents."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, base = 2, root
        elif controller in controllers.split(","):
            version, base = 1, root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        if not folder.is_dir():
            # A container sees its own group as the mount point, while the file can name it from the host.
            folder = base
        while folder.is_relative_to(base):
            yield version, folder
            if folder == base:
                break
            folder = folder.parent


def return_freed_memory(every_s: float = 10.0) -> None:
    """From now on, let what threads free be used by the others and by the system; does nothing without glibc.

    By default nearly each of a server's threads has an arena of its own and keeps what it freed. Tensors of some megabytes
    lie between small ones there, so that the gaps that they leave are not returned: under load, both together were more than
    half of the process, and it went on growing. So there are two arenas, tensors of 4 MiB and more have mappings of their
    own, and a thread returns the gaps every so often. A setting whose environment variable is there stays, and all do where
    GLIBC_TUNABLES has any of them.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):  # another C library
        return
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    for variable, (option, value) in _MALLOC.items():
        if not (tuned or variable in os.environ):
            libc.mallopt(option, value)

    def trim() -> None:
        while True:
            time.sleep(every_s)
            libc.malloc_trim(0)

    threading.Thread(target=trim, name="kvweave-malloc-trim", daemon=True).start()
