"""Entries in pages: whole ones, and bit-exact where nothing is rounded."""

import pytest
import torch

from kvweave.decode.disk.entry_format import EntryFormat
from kvweave.types import STORAGES

SHAPES = [
    (128, torch.bfloat16),
    (80, torch.float16),
    (256, torch.float32),
    (6, torch.float32),
    (640, torch.float32),
]


@pytest.mark.parametrize(("width", "dtype"), SHAPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_a_page_holds_whole_entries_and_is_whole_disk_pages(width, dtype, storage):
    entry_format = EntryFormat(width, dtype, storage)
    keys, values = torch.randn(2, 37, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    entries = entry_format.encode(keys, values)
    assert entries.shape == (37, entry_format.entry_bytes)
    assert entry_format.entry_bytes % 8 == entry_format.page_bytes % 4096 == 0
    assert entry_format.page_entries >= 1
    memory = torch.full((40, entry_format.page_bytes), 255, dtype=torch.uint8)
    pages = list(range(entry_format.page_count(37)))[::-1]
    entry_format.fill_pages(memory, pages, entries)
    back = entry_format.entries_in(memory[pages]).flatten(0, 1)
    assert torch.equal(back[:37], entries)
    assert not back[37:].any()
    got = entry_format.decode(back[:37])
    for rows, found in zip((keys, values), got, strict=True):
        assert found.dtype == dtype
        if storage == "exact":
            assert torch.equal(found, rows)
        else:
            step = rows.float().abs().amax() / {"int8": 127, "int4": 7}[storage]
            assert (found.float() - rows.float()).abs().max() <= step * 0.51


@pytest.mark.parametrize(("width", "dtype"), SHAPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_single_entries_are_found_wherever_their_pages_are(width, dtype, storage):
    entry_format, random = EntryFormat(width, dtype, storage), torch.Generator().manual_seed(0)
    entries = entry_format.encode(*torch.randn(2, 37, width, generator=random).to(dtype))
    memory = torch.zeros(40, entry_format.page_bytes, dtype=torch.uint8)
    pages = torch.randperm(40, generator=random)[: entry_format.page_count(37)]
    entry_format.fill_pages(memory, pages.tolist(), entries)
    asked = torch.randint(0, 37, (2, 9), generator=random)
    numbers = (
        pages[asked // entry_format.page_entries] * entry_format.page_entries
        + asked % entry_format.page_entries
    )
    keys, values = entry_format.decode(entries[asked])
    assert torch.equal(entry_format.keys_at(memory, numbers), keys)
    assert torch.equal(entry_format.values_at(memory, numbers), values)


def test_a_3b_models_entry_fills_pages_without_a_gap():
    entry_format = EntryFormat(128, torch.bfloat16)
    assert (entry_format.entry_bytes, entry_format.page_entries, entry_format.page_bytes) == (512, 8, 4096)


def test_rounded_entries_take_about_half_and_a_quarter():
    exact, int8, int4 = (EntryFormat(128, torch.bfloat16, storage).entry_bytes for storage in STORAGES)
    assert int8 < 0.54 * exact
    assert int4 < 0.3 * exact


def test_the_checksum_ignores_order_and_detects_a_flipped_bit():
    entry_format = EntryFormat(8, torch.float32)
    entries = torch.randint(
        0, 256, (20, entry_format.entry_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    whole = entry_format.checksum(entries)
    assert entry_format.checksum(entries.flip(0)) == whole
    parts = entry_format.checksum(entries[:13]) + entry_format.checksum(entries[13:])
    assert (parts - whole) % 2**64 == 0
    entries[7, 3] ^= 1
    assert entry_format.checksum(entries) != whole
