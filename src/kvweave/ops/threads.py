"""How many threads PyTorch computes with: no more than the process has cores, a container's quota included."""

import logging
import os

import psutil
import torch

from kvweave.machine import cpu_limits

_LOG = logging.getLogger(__name__)
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables by which users choose the number themselves."""


def respect_cpu_limits() -> int:
    """Lower PyTorch's number of threads to what the process may use, unless somebody chose it; return the number.

    PyTorch knows a process's affinity, but not the quota of its control group. With more threads than that, all of them
    wait for the one that is throttled. A number that is not PyTorch's default was chosen, and stays.
    """
    current, limits = torch.get_num_threads(), cpu_limits()
    defaults = {limits.cores, psutil.cpu_count(logical=False), psutil.cpu_count(), os.cpu_count()}
    chosen = any(os.environ.get(name) for name in VARIABLES) or current not in defaults
    if not chosen and limits.threads < current:
        torch.set_num_threads(limits.threads)
        _LOG.info("computing with %d threads: the quota is %.4g cores", limits.threads, limits.quota)
    return torch.get_num_threads()
