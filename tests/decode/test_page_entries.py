"""Entries in pages: whole ones, back to the bit where nothing is rounded."""

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
def test_a_page_holds_whole_entries_and_is_whole_flash_pages(width, dtype, storage):
    form = EntryFormat(width, dtype, storage)
    keys, values = torch.randn(2, 37, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    entries = form.encode(keys, values)
    assert entries.shape == (37, form.bytes)
    assert form.bytes % 8 == form.page_bytes % 4096 == 0
    assert form.per_page >= 1
    memory = torch.full((40, form.page_bytes), 255, dtype=torch.uint8)
    pages = list(range(form.pages(37)))[::-1]
    form.lay_out(memory, pages, entries)
    back = form.entries_in(memory[pages]).flatten(0, 1)
    assert torch.equal(back[:37], entries)
    assert not back[37:].any()
    got = form.decode(back[:37])
    for rows, found in zip((keys, values), got, strict=True):
        assert found.dtype == dtype
        if storage == "exact":
            assert torch.equal(found, rows)
        else:
            step = rows.float().abs().amax() / {"int8": 127, "int4": 7}[storage]
            assert (found.float() - rows.float()).abs().max() <= step * 0.51


@pytest.mark.parametrize(("width", "dtype"), SHAPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_single_entries_are_found_wherever_their_pages_lie(width, dtype, storage):
    form, random = EntryFormat(width, dtype, storage), torch.Generator().manual_seed(0)
    entries = form.encode(*torch.randn(2, 37, width, generator=random).to(dtype))
    memory = torch.zeros(40, form.page_bytes, dtype=torch.uint8)
    pages = torch.randperm(40, generator=random)[: form.pages(37)]
    form.lay_out(memory, pages.tolist(), entries)
    asked = torch.randint(0, 37, (2, 9), generator=random)
    numbers = pages[asked // form.per_page] * form.per_page + asked % form.per_page
    keys, values = form.decode(entries[asked])
    assert torch.equal(form.keys_at(memory, numbers), keys)
    assert torch.equal(form.values_at(memory, numbers), values)


def test_a_3b_models_entry_fills_pages_without_a_gap():
    form = EntryFormat(128, torch.bfloat16)
    assert (form.bytes, form.per_page, form.page_bytes) == (512, 8, 4096)


def test_rounded_entries_take_about_half_and_a_quarter():
    exact, int8, int4 = (EntryFormat(128, torch.bfloat16, storage).bytes for storage in STORAGES)
    assert int8 < 0.54 * exact
    assert int4 < 0.3 * exact


def test_the_checksum_follows_appends_in_any_order_and_tells_a_flipped_bit():
    form = EntryFormat(8, torch.float32)
    entries = torch.randint(
        0, 256, (20, form.bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    whole = form.checksum(entries)
    assert form.checksum(entries.flip(0)) == whole
    parts = form.checksum(entries[:13]) + form.checksum(entries[13:])
    assert (parts - whole) % 2**64 == 0
    entries[7, 3] ^= 1
    assert form.checksum(entries) != whole
