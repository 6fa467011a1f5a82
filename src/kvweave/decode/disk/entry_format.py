"""Byte format of an entry: a key and its value, in a page.

An entry's length is a multiple of 8 bytes, and no entry straddles two pages. Knows nothing of files or clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.ops.quantise import BITS, SCALE_BYTES, dequantise_rows, quantise_rows
from kvweave.types import Storage

Count = TypeVar("Count", int, NDArray[np.int64])

_GROUP = {8: 128, 4: 32}  # numbers that share a scale


@dataclass(frozen=True)
class EntryFormat:
    """Format of keys and values of width D in the model's `dtype`; for `storage` see `OffloadSettings`."""

    width: int
    dtype: torch.dtype
    storage: Storage = "exact"
    disk_page_bytes: int = 4096

    @cached_property
    def entry_bytes(self) -> int:
        return -(-self._payload_bytes // 8) * 8

    @cached_property
    def page_bytes(self) -> int:
        """Length of a page: the disk's, or as many of these as an entry needs."""
        return -(-self.entry_bytes // self.disk_page_bytes) * self.disk_page_bytes

    @cached_property
    def page_entries(self) -> int:
        return self.page_bytes // self.entry_bytes

    @cached_property
    def workspace_bytes(self) -> int:
        """Memory for attention to one page: copies, and float32 of what is multiplied."""
        numbers = self.page_entries * self.width
        if self._pages_are_rows:
            return self.page_bytes + 4 * numbers
        return 2 * self.page_bytes + (2 * self.dtype.itemsize + 8) * numbers

    def page_count(self, entries: Count) -> Count:
        """Return the pages of a cluster with this number of entries; elementwise for arrays."""
        return -(-entries // self.page_entries)

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return keys and values (…, D) as entries (…, entry bytes) uint8."""
        if self.storage == "exact":
            parts = [torch.cat([keys, values], dim=-1).contiguous().view(torch.uint8)]
        else:
            parts = []
            for rows in (keys, values):
                codes, scales = quantise_rows(rows, BITS[self.storage], self._group)
                parts += [codes, scales.view(torch.uint8)]
        payload = torch.cat(parts, dim=-1)
        return torch.nn.functional.pad(payload, (0, self.entry_bytes - payload.shape[-1])).cpu()

    def decode(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (…, D) in `dtype` of entries (…, entry bytes); views if storage is exact."""
        return self._half(entries, 0), self._half(entries, 1)

    def keys_at(self, memory: Tensor, numbers: Tensor) -> Tensor:
        """Return keys (…, D) of single entries in `memory` (count, page bytes).

        Entry s of page p has the number p · page entries + s.
        """
        return self._half_at(memory, numbers, 0)

    def values_at(self, memory: Tensor, numbers: Tensor) -> Tensor:
        """Return values (…, D); as `keys_at`."""
        return self._half_at(memory, numbers, 1)

    def fill_pages(self, memory: Tensor, pages: Sequence[int], entries: Tensor) -> None:
        """Write entries (n, entry bytes) to these pages of `memory` (count, page bytes); the rest of them is zero."""
        padded = torch.zeros(len(pages) * self.page_entries, self.entry_bytes, dtype=torch.uint8)
        padded[: entries.shape[0]] = entries
        used_bytes = self.page_entries * self.entry_bytes
        content = torch.zeros(len(pages), self.page_bytes, dtype=torch.uint8)
        content[:, :used_bytes] = padded.view(len(pages), used_bytes)
        memory[list(pages)] = content

    def entries_in(self, pages: Tensor) -> Tensor:
        """Return pages (…, page bytes) as entries (…, page entries, entry bytes), unused ones included; a view."""
        used = pages[..., : self.page_entries * self.entry_bytes]
        return used.view(*used.shape[:-1], self.page_entries, self.entry_bytes)

    def checksum(self, entries: Tensor) -> int:
        """Return the sum of the words of entries (n, entry bytes) modulo 2⁶⁴, which is additive and ignores order."""
        if not entries.numel():
            return 0
        return int(entries.contiguous().view(torch.int64).sum())

    def _half_at(self, memory: Tensor, numbers: Tensor, half: int) -> Tensor:
        if self._pages_are_rows:
            rows = memory.view(self.dtype).view(-1, self.width)  # keys and values in turn
            return rows.index_select(0, (2 * numbers + half).flatten()).view(*numbers.shape, self.width)
        used = self.entries_in(memory).view(torch.int64)  # a view: (count, page entries, words)
        entries = used[numbers // self.page_entries, numbers % self.page_entries].view(torch.uint8)
        return self._half(entries, half)

    def _half(self, entries: Tensor, half: int) -> Tensor:
        if self.storage == "exact":
            rows = entries[..., : 2 * self.width * self.dtype.itemsize].view(self.dtype)
            return rows[..., half * self.width : (half + 1) * self.width]
        bits = BITS[self.storage]
        codes, scales = self.width * bits // 8, self.width // self._group * SCALE_BYTES
        at = half * (codes + scales)
        own_scales = entries[..., at + codes : at + codes + scales].contiguous().view(torch.float16)
        return dequantise_rows(entries[..., at : at + codes], own_scales, bits, self.dtype)

    @property
    def _pages_are_rows(self) -> bool:
        """Whether a page consists of keys and values in turn, without padding."""
        return self.storage == "exact" and self.page_bytes == self.page_entries * self._payload_bytes

    @property
    def _payload_bytes(self) -> int:
        """Bytes of an entry without alignment."""
        if self.storage == "exact":
            return 2 * self.width * self.dtype.itemsize
        return 2 * (self.width * BITS[self.storage] // 8 + self.width // self._group * SCALE_BYTES)

    @property
    def _group(self) -> int:
        group = min(self.width, _GROUP[BITS[self.storage]])
        return group if self.width % group == 0 else self.width
