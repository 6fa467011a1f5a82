"""A knowledge base on a full disk: answers are computed, and nothing is damaged once there is space again."""

import logging
import os
import subprocess
from contextlib import suppress

import pytest

from kvweave.errors import KvweaveError
from support.tiny_kb import open_tiny, text

QUESTION = "what about the river"


@pytest.fixture
def small_home(tmp_path):
    """A file system of 6 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a size-limited file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a size-limited file system here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file):
    """Fill the file system to the last byte."""
    with file.open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(b"\0" * 4096)


@pytest.mark.root
def test_on_a_full_disk_chunks_are_computed_and_stored_ones_stay_intact(tiny, small_home, tmp_path, caplog):
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(8):
        (documents / f"{number}.txt").write_text(text(number, parts=75))
    with caplog.at_level(logging.WARNING, "kvweave"):
        with open_tiny(small_home, limit_bytes=10**9) as base:
            base.add(documents)
            assert len(base.documents()) == 8
            assert base.missing_kv() > 0  # the disk was too small for all KV
            assert base.store.stats().entries > 20
            expected = base.ask(QUESTION, recipe="full").text
            assert base.ask(QUESTION, recipe="prefix").text == expected
            assert caplog.text.count("the disk is full") == 1
            fill(small_home / "ballast")
            for recipe in ("prefix", "reuse"):
                assert base.ask(QUESTION, recipe=recipe).text
            assert base.ask(QUESTION, recipe="prefix").text == expected
            (documents / "more.txt").write_text(text(99))
            with pytest.raises((KvweaveError, OSError)):
                base.add(documents / "more.txt")
            assert base.ask(QUESTION, recipe="prefix").text == expected
        (small_home / "ballast").unlink()
        with open_tiny(small_home) as base:
            assert base.store.verify().sound
            base.store.set_limit(base.store.used_bytes // 2)
            base.add(documents / "more.txt")
            assert len(base.documents()) == 9
            assert base.ask("what about 99").text
