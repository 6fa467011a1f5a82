"""Disks fail: a clear error, nothing left behind, and never an answer from what was not read."""

import errno
import os

import pytest
import torch
from driving import Text, geometry, settings

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.decode.settings import PageCacheSettings
from kvweave.errors import StoreError, StoreFull

TIGHT = {"kv_budget": 1.0, "resident_bytes": 40_000}


def begun(folder, **changes) -> tuple[OffloadedCache, Text]:
    held = OffloadedCache(geometry(), settings(**(TIGHT | changes), folder=folder))
    text = Text(held)
    text.begin(400)
    return held, text


def steps(text: Text, count: int = 40) -> None:
    for _ in range(count):
        text.step()


def test_a_full_disk_says_so(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(StoreFull, match="no space is left"):
        begun(tmp_path)


def test_a_disk_that_fills_up_in_the_middle_of_a_page_says_so(tmp_path, monkeypatch):
    held, text = begun(tmp_path)
    original = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: original(fd, [parts[0][:64]], at))
    with held, pytest.raises(StoreFull, match="only 64 of 256 bytes"):
        steps(text)


def test_a_read_error_ends_the_step_and_the_text(tmp_path, monkeypatch):
    held, text = begun(tmp_path)

    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with held:
        with pytest.raises(StoreError, match="could not be read: Input/output error"):
            steps(text)
        monkeypatch.undo()
        with pytest.raises(StoreError, match="cannot be used any more"):
            steps(text)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_file_cut_short_while_it_is_used_is_found(tmp_path, prefetch):
    held, text = begun(tmp_path, residency=PageCacheSettings(prefetch=prefetch))
    with held:
        os.ftruncate(held.parts.store.pages.file._descriptor, 1024)
        with pytest.raises(StoreError, match=r"cut short|not what was written"):
            steps(text)


def test_what_others_wrote_into_the_file_is_found(tmp_path):
    held, text = begun(tmp_path)
    with held:
        os.pwrite(
            held.parts.store.pages.file._descriptor, b"\x01" * held.parts.store.pages.file.length_bytes, 0
        )
        with pytest.raises(StoreError, match="not what was written"):
            steps(text)


def test_nothing_is_left_in_the_folder_even_while_it_is_used(tmp_path):
    held, text = begun(tmp_path)
    with held:
        steps(text, 3)
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"no file for the KV can be made in .*file"):
        OffloadedCache(geometry(), settings(folder=tmp_path / "file" / "below"))


def test_without_direct_reads_it_works_through_the_page_cache(tmp_path, monkeypatch):
    original = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    held, text = begun(tmp_path, resident_bytes=400_000, flash={"page_bytes": 4096})
    with held:
        assert not held.parts.store.pages.file.direct
        query, output = text.step()
        torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)


def test_a_disk_that_is_full_while_half_filled_pages_are_written_ends_the_text(tmp_path, monkeypatch):
    held, text = begun(tmp_path)

    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with held:
        steps(text, 3)
        monkeypatch.setattr(os, "pwritev", refuse)
        with pytest.raises(StoreFull):
            held.flush()
        monkeypatch.undo()
        assert not held.usable
        with pytest.raises(StoreError, match="cannot be used any more: no space is left"):
            text.step()


def test_a_half_filled_page_that_could_not_be_written_is_still_there(tmp_path, monkeypatch):
    held, text = begun(tmp_path)
    with held:
        steps(text, 10)
        store = held.parts.store
        before, free = store._tails.keys(), store.residents.frames.free
        assert before

        def refuse(*args):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwritev", refuse)
        with pytest.raises(StoreError):
            store._tails.write_any()
        assert (store._tails.keys(), store.residents.frames.free) == (before, free)
        monkeypatch.undo()
        assert store._tails.write_any()
        assert (len(store._tails), store.residents.frames.free) == (len(before) - 1, free + 1)


def test_whoever_interrupts_a_step_ends_the_text(tmp_path, monkeypatch):
    held, text = begun(tmp_path)

    def interrupt(*args, **more):
        raise KeyboardInterrupt

    with held:
        monkeypatch.setattr(type(held.layers[0].retriever), "newcomers", interrupt)
        with pytest.raises(KeyboardInterrupt):
            steps(text)
        monkeypatch.undo()
        with pytest.raises(StoreError, match="cannot be used any more: it was stopped by KeyboardInterrupt"):
            text.step()


def test_zeros_where_single_entries_were_written_are_found(tmp_path):
    held, text = begun(tmp_path, strategy="entries")
    with held:
        file = held.parts.store.pages.file
        length = file.length_bytes
        os.ftruncate(file._descriptor, 0)
        os.ftruncate(file._descriptor, length)
        with pytest.raises(
            StoreError, match=r"page \d+ of layer 0, head \d was read and is not what was written"
        ):
            text.step()
