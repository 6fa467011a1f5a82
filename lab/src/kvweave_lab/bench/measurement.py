"""How one step is measured: its seconds, their median and range over repeats, its peak memory; plain file reads.

With every measurement its `Environment` is recorded: command, version, commit, date and machine.
"""

import ctypes
import datetime
import gc
import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

import kvweave
from kvweave.machine import memory_limit_bytes as memory_limit_bytes

READ_BYTES = 8 * 2**20
"""Bytes of one read: enough for the disk, not the system calls, to be the bottleneck."""
_STATUS = Path("/proc/self/status")
_SAMPLE_EVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class MedianRange:
    """The median, smallest and largest of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Summarize at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


def paired_ratios(parts: Sequence[float], wholes: Sequence[float]) -> MedianRange:
    """Divide measurements that were taken in turn, each part by the whole of the same round."""
    return MedianRange.of(part / whole for part, whole in zip(parts, wholes, strict=True))


def mean_of_neighbours(
    order: Sequence[str | int], case: int, way: str, full_s: Sequence[float]
) -> list[float]:
    """Return, for each run of a case, the mean of a full prefill's times right before and after it.

    `order` is everything that was timed, `full_s` the times of the full prefill `way` in order. Where one side has no
    full prefill, the other side's time is returned.
    """
    found: list[float] = []
    times, before, waiting = iter(full_s), None, 0  # runs of the case since `before`
    for timed in order:
        waiting += timed == case
        if timed == way:
            after = next(times)
            found += [after if before is None else (before + after) / 2] * waiting
            before, waiting = after, 0
    return [*found, *[before] * waiting] if before is not None else found


def elapsed_s(step: Callable[[], object]) -> float:
    """Run a step and return its seconds."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def peak_memory_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Run a step once and return its peak memory beyond what was held before; None where that cannot be known.

    On GPUs, PyTorch keeps the count. On Linux, a thread samples the process's anonymous memory every few milliseconds.
    Sampling costs a little time, so time the step in another run.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return int(torch.cuda.max_memory_allocated(device)) - before
    if _anonymous_bytes() is None:
        step()
        return None
    trim_heap()
    sampler = _MemorySampler()
    try:
        step()
    finally:
        sampler.stop()
    return sampler.peak - sampler.before


class _MemorySampler:
    """Samples the process's memory in a thread until it is stopped."""

    def __init__(self) -> None:
        self.before = self.peak = _anonymous_bytes() or 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and end the thread."""
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, _anonymous_bytes() or 0)

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_EVERY_S):
            self.peak = max(self.peak, _anonymous_bytes() or 0)


def resident_bytes() -> int:
    """Return the process's resident memory, mapped files included; 0 where the system does not report it."""
    return _status_bytes("VmRSS:") or 0


def _anonymous_bytes() -> int | None:
    """Return resident memory that is not backed by a file; None where the system does not report it."""
    return _status_bytes("RssAnon:")


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def trim_heap() -> None:
    """Return free heap memory to the system, so that a step's allocations become visible."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def read_files(files: Sequence[Path]) -> None:
    """Read files one after the other into memory that is already allocated."""
    buffer = bytearray(READ_BYTES)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while os.readv(descriptor, [buffer]):
                pass
        finally:
            os.close(descriptor)


def read_mapped(files: Sequence[Path]) -> None:
    """Map files and read every byte once, by a sum over 64-bit words, which is the fastest way here."""
    for file in files:
        words = file.stat().st_size // 8
        np.memmap(file, dtype=np.uint64, mode="r", shape=(words,)).sum()


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
