"""Disk failures raise a clear error, leave nothing behind, and never yield an answer from unread data."""

import errno
import os

import pytest
import torch

from kvweave.decode.offloaded_cache import OffloadedCache
from kvweave.errors import StoreError, StoreFull
from support.synthetic import Text, geometry, settings

TIGHT = {"kv_budget": 1.0, "resident_bytes": 40_000}


def begun(folder, **changes) -> tuple[OffloadedCache, Text]:
    cache = OffloadedCache(geometry(), settings(**(TIGHT | changes), folder=folder))
    text = Text(cache)
    text.begin(400)
    return cache, text


def steps(text: Text, count: int = 40) -> None:
    for _ in range(count):
        text.step()


def test_a_full_disk_raises(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(StoreFull, match="no space is left"):
        begun(tmp_path)


def test_a_disk_that_fills_up_within_a_page_raises(tmp_path, monkeypatch):
    cache, text = begun(tmp_path)
    original = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: original(fd, [parts[0][:64]], at))
    with cache, pytest.raises(StoreFull, match="only 64 of 256 bytes"):
        steps(text)


def test_a_read_error_fails_the_step_and_the_text(tmp_path, monkeypatch):
    cache, text = begun(tmp_path)

    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", refuse)
    with cache:
        with pytest.raises(StoreError, match="could not be read: Input/output error"):
            steps(text)
        monkeypatch.undo()
        with pytest.raises(StoreError, match="cannot be used any more"):
            steps(text)


def test_a_file_cut_short_in_use_is_detected(tmp_path):
    cache, text = begun(tmp_path)
    with cache:
        os.ftruncate(cache.shared.store.pages.file.descriptor, 1024)
        with pytest.raises(StoreError, match=r"cut short|not what was written"):
            steps(text)


def test_foreign_writes_to_the_file_are_detected(tmp_path):
    cache, text = begun(tmp_path)
    with cache:
        os.pwrite(
            cache.shared.store.pages.file.descriptor,
            b"\x01" * os.fstat(cache.shared.store.pages.file.descriptor).st_size,
            0,
        )
        with pytest.raises(StoreError, match="not what was written"):
            steps(text)


def test_the_folder_stays_empty_even_in_use(tmp_path):
    cache, text = begun(tmp_path)
    with cache:
        steps(text, 3)
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"no file for the KV can be made in .*file"):
        OffloadedCache(geometry(), settings(folder=tmp_path / "file" / "below"))


def test_without_direct_reads_the_system_page_cache_is_used(tmp_path, monkeypatch):
    original = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    cache, text = begun(tmp_path, resident_bytes=400_000, disk={"page_bytes": 4096})
    with cache:
        assert not cache.shared.store.pages.file.direct
        query, output = text.step()
        torch.testing.assert_close(output, text.dense(query), atol=1e-4, rtol=1e-4)


def test_a_full_disk_while_half_filled_pages_are_written_fails_the_text(tmp_path, monkeypatch):
    cache, text = begun(tmp_path)

    def refuse(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with cache:
        steps(text, 10)
        monkeypatch.setattr(os, "pwritev", refuse)
        with pytest.raises(StoreFull):
            cache.flush()
        monkeypatch.undo()
        assert not cache.usable
        with pytest.raises(StoreError, match="cannot be used any more: no space is left"):
            text.step()


def test_a_half_filled_page_that_cannot_be_written_stays(tmp_path, monkeypatch):
    cache, text = begun(tmp_path, kv_budget=1_000, resident_bytes=50_000)
    with cache:
        steps(text, 10)
        store = cache.shared.store
        before, free = store.tails.keys(), store.page_cache.frames.free_count
        assert before

        def refuse(*args):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pwritev", refuse)
        with pytest.raises(StoreError):
            store.tails.evict_one()
        assert (store.tails.keys(), store.page_cache.frames.free_count) == (before, free)
        monkeypatch.undo()
        assert store.tails.evict_one()
        assert (len(store.tails), store.page_cache.frames.free_count) == (len(before) - 1, free + 1)


def test_an_interrupted_step_fails_the_text(tmp_path, monkeypatch):
    cache, text = begun(tmp_path)

    def interrupt(*args, **more):
        raise KeyboardInterrupt

    with cache:
        monkeypatch.setattr(type(cache.layers[0].retriever), "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            steps(text)
        monkeypatch.undo()
        with pytest.raises(StoreError, match="cannot be used any more: it was stopped by KeyboardInterrupt"):
            text.step()
