"""How much memory a step takes at its peak, beyond what is held before it.

On GPUs PyTorch keeps count. On Linux the process's own memory is looked at every few milliseconds, mapped files not
counted; elsewhere it is not known. Looking costs a little time, so a step that is timed is another one.
"""

import ctypes
import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_EVERY_S = 0.002


def peak_bytes(step: Callable[[], object], device: torch.device) -> int | None:
    """Of one run of `step`; None where it cannot be known."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return int(torch.cuda.max_memory_allocated(device)) - before
    if _own_bytes() is None:
        step()
        return None
    _return_free_memory()
    watch = _Watch()
    try:
        step()
    finally:
        watch.stop()
    return watch.most - watch.before


class _Watch:
    """Looks at the process's memory from a thread of its own until it is stopped."""

    def __init__(self) -> None:
        self.before = self.most = _own_bytes() or 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and no more."""
        self._done.set()
        self._thread.join()
        self.most = max(self.most, _own_bytes() or 0)

    def _look(self) -> None:
        while not self._done.wait(_EVERY_S):
            self.most = max(self.most, _own_bytes() or 0)


def _own_bytes() -> int | None:
    """Resident memory that belongs to no file."""
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None


def _return_free_memory() -> None:
    """Have the C library give back what is free, so that a step does not draw on it unseen."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
