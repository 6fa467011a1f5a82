"""Reading files as fast as it goes and nothing else: what loading stored KV is compared with."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

READ_BYTES = 8 * 2**20
"""How much a read asks for at once: enough that the disk, and not the asking, sets the pace."""


def read_files(files: Sequence[Path]) -> None:
    """One after the other, from beginning to end, into memory that is there already."""
    buffer = bytearray(READ_BYTES)
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            while os.readv(descriptor, [buffer]):
                pass
        finally:
            os.close(descriptor)


def read_mapped(files: Sequence[Path]) -> None:
    """Every byte once, by the fastest reader at hand: a sum over 64-bit words."""
    for file in files:
        words = file.stat().st_size // 8
        np.memmap(file, dtype=np.uint64, mode="r", shape=(words,)).sum()
