"""What PyTorch may use of a CPU: no more threads than the process has cores, a container's quota included, and little memory for
the kernels that oneDNN compiles.

Every thread that runs a parallel operation gets helper threads of its own, and keeps them. As soon as there are more of them
than cores, GNU OpenMP no longer lets any of them wait actively, and passes of the model take up to half as long again
(`lab/experiments/helper_threads.py`). So threads beside the one that runs passes compute without helpers.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import psutil

from kvweave.machine import cpu_limits

_LOG = logging.getLogger(__name__)
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which users choose the number themselves."""
_SHAPES_KEPT: Final = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "8"}
"""How many shapes of half-precision products keep what was made for them: compiled kernels in oneDNN, of more than a megabyte,
and descriptions in every thread of PyTorch, of 260 kB. Both keep those of 1,024 shapes by themselves. A server's passes have any
number of rows: it grew by gigabytes. Decoding comes back to a few dozen shapes; a description is made again in microseconds where
the kernel is there.
"""


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
    chosen = any(os.environ.get(name) for name in VARIABLES) or current not in defaults
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
