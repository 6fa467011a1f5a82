"""The limit: the time to first token of a request that wastes nothing, as a stated model.

    limit = Σ over passes of max(FLOPs / rate, weight bytes / memory bandwidth) + stored bytes / read bandwidth

FLOPs are those of the rows that a request computes (`work.py`): the selection's pass, and the recomputation's. The
rate is the one that the full prefill of the same prompt reaches on this machine, in this run; memory bandwidth is that
of adding up a large tensor; read bandwidth is that of reading the entry files from beginning to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvweave_lab.bench.plain_reads import read_files
from kvweave_lab.bench.spread import timed
from kvweave_lab.bench.work import Work

_TRIES = 5
_SUMMED_BYTES = 2**28  # far more than the last-level cache holds


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine does in a second, while this was measured."""

    flops: float
    memory_bytes: float
    read_bytes: float

    def limit_s(self, works: Sequence[Work], stored_bytes: int) -> float:
        """Seconds that the passes and the loading of a request take at these rates."""
        passes = (max(work.flops / self.flops, work.weight_bytes / self.memory_bytes) for work in works)
        return sum(passes) + stored_bytes / self.read_bytes


def memory_bytes_per_s(device: torch.device) -> float:
    """The best of several tries at adding up a large tensor with all threads."""
    numbers = torch.ones(_SUMMED_BYTES // 4, dtype=torch.float32, device=device)
    return _SUMMED_BYTES / min(timed(lambda: float(numbers.sum())) for _ in range(_TRIES))


def read_bytes_per_s(files: Sequence[Path]) -> float:
    """Of reading these files one after the other, as fast or slow as the page cache and the disk are at the moment."""
    return sum(file.stat().st_size for file in files) / timed(lambda: read_files(files))
