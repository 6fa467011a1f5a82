"""What this process may use of the machine: cores, and memory. Both can be less than the machine has.

A container's limits are in control groups, of version 1 or 2, its own and its parents'. Affinity (`taskset`, Slurm,
Kubernetes' static policy) limits cores too. PyTorch knows no quota, so its threads are limited here, and which products
a CPU computes in hardware is found here. Loads no other part of kvweave, and PyTorch only to ask or set what is PyTorch's.

Every thread that runs a parallel operation gets helper threads of its own, and keeps them. As soon as there are more of them
than cores, GNU OpenMP no longer lets any of them wait actively, and passes of the model take up to half as long again
(`lab/experiments/helper_threads.py`). So threads beside the one that runs passes compute without helpers.

An active wait also takes a core from whoever would end it. Beside other programs that use every core, products of two threads took 20
to 60 times as long. So the `kvweave` command lets a thread look 3,000 times before it sleeps (GOMP_SPINCOUNT in `cli/app.py`; GNU
OpenMP's own number is a hundred times larger), and its processes inherit it. On an idle machine, passes are as fast as before within
the noise; with OMP_WAIT_POLICY=passive, decoding took a quarter longer.
"""

import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)

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


# What PyTorch may use of a CPU

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which users choose the number themselves."""
_SHAPES_KEPT: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "8"}
"""How many shapes of half-precision products keep what was made for them: compiled kernels in oneDNN, of more than a megabyte,
and descriptions in every thread of PyTorch, of 260 kB. Both keep those of 1,024 shapes by themselves. A server's passes have any
number of rows: it grew by gigabytes. Decoding comes back to a few dozen shapes; a description is made again in microseconds where
the kernel is there.
"""


def boot_id() -> str:
    """Return what names this run of the machine, from its start to its end; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def respect_cpu_limits() -> int:
    """Lower PyTorch's number of threads to what the process may use, unless the user chose it; return the number.

    PyTorch knows a process's affinity, but not the quota of its control group. With more threads than that, all of them
    wait for the one that is throttled. A number that is not PyTorch's default was chosen, and stays. What is kept for shapes
    of products is lowered likewise, if none was computed yet.
    """
    import torch  # loaded only where something is computed

    for name, shapes in _SHAPES_KEPT.items():
        os.environ.setdefault(name, shapes)
    current, limits = torch.get_num_threads(), cpu_limits()
    defaults = {limits.cores, psutil.cpu_count(logical=False), psutil.cpu_count(), os.cpu_count()}
    chosen = any(os.environ.get(name) for name in THREAD_VARIABLES) or current not in defaults
    if not chosen and limits.threads < current:
        torch.set_num_threads(limits.threads)
        _LOG.info("computing with %d threads: the quota is %.4g cores", limits.threads, limits.quota)
    return torch.get_num_threads()


_PAUSE_SOFT: Final = 1  # omp_pause_soft: helper threads end, settings stay
_here = threading.local()  # `limited`: the threads that this one would use, where it computes without helpers


def use_one_thread() -> None:
    """From now on, compute in this thread without helper threads, except in `all_threads`."""
    import torch

    _here.limited = torch.get_num_threads()  # asked first: a thread's first operation sets the number
    _set_threads_here(1)


@contextmanager
def all_threads() -> Iterator[None]:
    """Compute with helper threads in this context, also in a thread that uses one; they end with the context."""
    count = getattr(_here, "limited", None)
    if count is None:
        yield
        return
    _set_threads_here(count)
    _here.limited = None
    try:
        yield
    finally:
        _here.limited = count
        _set_threads_here(1)
        omp = _library("libgomp.so.1")
        if omp is not None:
            omp.omp_pause_resource_all(_PAUSE_SOFT)


def free_buffers() -> None:
    """Free what MKL keeps for this thread's products, about 4 MB after an embedding. For a thread that is one of many.

    The next product makes them again, which takes no time that could be measured.
    """
    math = _library("libtorch_cpu.so")
    if math is not None and hasattr(math, "mkl_serv_thread_free_buffers"):
        math.mkl_serv_thread_free_buffers()


def _set_threads_here(count: int) -> None:
    """Set the threads of operations that this thread starts; `torch.set_num_threads` would set those of others too."""
    omp, math = _library("libgomp.so.1"), _library("libtorch_cpu.so")
    if omp is not None:
        omp.omp_set_num_threads(count)
    if math is not None and hasattr(math, "MKL_Set_Num_Threads_Local"):
        math.MKL_Set_Num_Threads_Local(count)


@cache
def _library(name: str) -> ctypes.CDLL | None:
    """Return a library that PyTorch has loaded; None in builds without it, whose helpers behave otherwise."""
    import torch

    path = Path(torch.__file__).parent / "lib" / name
    try:
        return ctypes.CDLL(str(path)) if path.exists() else None
    except OSError:
        return None


# The units of a CPU

_UNITS: Final = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16"),
    "float16": ("amx_fp16", "avx512_fp16", "fp16_arith"),
}
_NAMES = {
    "AVX2": ("avx2",),
    "AVX512": ("avx512_f",),
    "VNNI": ("avx512_vnni", "avx_vnni"),
    "AMX": ("amx_int8", "amx_bf16"),
    "bfloat16": _UNITS["bfloat16"],
    "float16": _UNITS["float16"],
    "dot product": ("dot", "neon_dot"),
    "SVE": ("sve", "sve2"),
}


def cpu_units() -> list[str]:
    """Return the names of the units that matter for matrix products and that this CPU has."""
    import torch

    has = torch.cpu.get_capabilities()
    return [name for name, flags in _NAMES.items() if any(has.get(flag) for flag in flags)]


def has_fast_matmul(device: "torch.device", dtype: "torch.dtype") -> bool:
    """Whether matrix products of this dtype are no slower than those of float32; always true off the CPU."""
    import torch

    units = _UNITS.get(str(dtype).removeprefix("torch."))
    if device.type != "cpu" or units is None:
        return True
    has = torch.cpu.get_capabilities()
    return any(has.get(unit) for unit in units)
