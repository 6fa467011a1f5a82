"""One entry, a key and its value, as bytes in a page.

An entry is `bytes` long, a multiple of 8, and never straddles two pages. Knows nothing of files or clusters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.ops.quantise import BITS, SCALE_BYTES, quantise_rows, restore_rows
from kvweave.types import Storage

Count = TypeVar("Count", int, NDArray[np.int64])

_GROUP = {8: 128, 4: 32}  # numbers that share a scale


@dataclass(frozen=True)
class EntryFormat:
    """How a key and a value of width D and of the model's `dtype` become bytes; see `settings.OffloadSettings.storage`."""

    width: int
    dtype: torch.dtype
    storage: Storage = "exact"
    flash_page_bytes: int = 4096

    @cached_property
    def bytes(self) -> int:
        """Length of an entry."""
        return -(-self._plain // 8) * 8

    @cached_property
    def page_bytes(self) -> int:
        """Length of a page: the flash's own, or as many of them as an entry needs."""
        return -(-self.bytes // self.flash_page_bytes) * self.flash_page_bytes

    @cached_property
    def per_page(self) -> int:
        """Entries in a page."""
        return self.page_bytes // self.bytes

    @cached_property
    def laid_out_bytes(self) -> int:
        """Memory that a page's entries take while they are attended to: copies, and float32 of what is multiplied."""
        numbers = self.per_page * self.width
        if self._pages_are_rows:
            return self.page_bytes + 4 * numbers
        return 2 * self.page_bytes + (2 * self.dtype.itemsize + 8) * numbers

    def pages(self, entries: Count) -> Count:
        """Pages that so many entries of one cluster take; of an array of numbers, each its own."""
        return -(-entries // self.per_page)

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Keys and values (…, D) as entries (…, bytes) uint8."""
        if self.storage == "exact":
            parts = [torch.cat([keys, values], dim=-1).contiguous().view(torch.uint8)]
        else:
            parts = []
            for rows in (keys, values):
                codes, scales = quantise_rows(rows, BITS[self.storage], self._group)
                parts += [codes, scales.view(torch.uint8)]
        made = torch.cat(parts, dim=-1)
        return torch.nn.functional.pad(made, (0, self.bytes - made.shape[-1])).cpu()

    def decode(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Entries (…, bytes) as keys and values (…, D) in `dtype`; exact ones are views."""
        return self.keys(entries), self.values(entries)

    def keys(self, entries: Tensor) -> Tensor:
        """The keys alone."""
        return self._half(entries, 0)

    def values(self, entries: Tensor) -> Tensor:
        """The values alone."""
        return self._half(entries, 1)

    def keys_at(self, memory: Tensor, numbers: Tensor) -> Tensor:
        """Keys (…, D) of single entries in `memory` (count, page bytes): entry s of page p has the number p · per page + s."""
        return self._half_at(memory, numbers, 0)

    def values_at(self, memory: Tensor, numbers: Tensor) -> Tensor:
        """Their values (…, D)."""
        return self._half_at(memory, numbers, 1)

    def _half_at(self, memory: Tensor, numbers: Tensor, half: int) -> Tensor:
        if self._pages_are_rows:
            rows = memory.view(self.dtype).view(-1, self.width)  # keys and values in turn
            return rows.index_select(0, (2 * numbers + half).flatten()).view(*numbers.shape, self.width)
        used = self.entries_in(memory).view(torch.int64)  # a view: (count, per page, words)
        entries = used[numbers // self.per_page, numbers % self.per_page].view(torch.uint8)
        return self._half(entries, half)

    def _half(self, entries: Tensor, half: int) -> Tensor:
        if self.storage == "exact":
            rows = entries[..., : 2 * self.width * self.dtype.itemsize].view(self.dtype)
            return rows[..., half * self.width : (half + 1) * self.width]
        bits = BITS[self.storage]
        codes, scales = self.width * bits // 8, self.width // self._group * SCALE_BYTES
        at = half * (codes + scales)
        of_scales = entries[..., at + codes : at + codes + scales].contiguous().view(torch.float16)
        return restore_rows(entries[..., at : at + codes], of_scales, bits, self.dtype)

    def lay_out(self, memory: Tensor, pages: Sequence[int], entries: Tensor) -> None:
        """Fill these pages of `memory` (count, page bytes) with entries (n, bytes); what is left of them is zero."""
        padded = torch.zeros(len(pages) * self.per_page, self.bytes, dtype=torch.uint8)
        padded[: entries.shape[0]] = entries
        laid = torch.zeros(len(pages), self.page_bytes, dtype=torch.uint8)
        laid[:, : self.per_page * self.bytes] = padded.view(len(pages), self.per_page * self.bytes)
        memory[list(pages)] = laid

    def entries_in(self, pages: Tensor) -> Tensor:
        """Pages (…, page bytes) as entries (…, per page, bytes), those that are none too; a view."""
        used = pages[..., : self.per_page * self.bytes]
        return used.view(*used.shape[:-1], self.per_page, self.bytes)

    def checksum(self, entries: Tensor) -> int:
        """The sum of the entries' (n, bytes) words modulo 2⁶⁴: it may be added to, and does not depend on order."""
        if not entries.numel():
            return 0
        return int(entries.contiguous().view(torch.int64).sum())

    @property
    def _pages_are_rows(self) -> bool:
        """Whether a page is nothing but keys and values in turn."""
        return self.storage == "exact" and self.page_bytes == self.per_page * self._plain

    @property
    def _plain(self) -> int:
        """Bytes of an entry that are not there for alignment alone."""
        if self.storage == "exact":
            return 2 * self.width * self.dtype.itemsize
        return 2 * (self.width * BITS[self.storage] // 8 + self.width // self._group * SCALE_BYTES)

    @property
    def _group(self) -> int:
        group = min(self.width, _GROUP[BITS[self.storage]])
        return group if self.width % group == 0 else self.width
