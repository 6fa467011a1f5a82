"""Fixtures and settings of all tests, those of kvweave and of its lab."""

import importlib
import os
import signal
from pathlib import Path

import pytest
import torch

from kvweave.samples import DOCUMENTS

ROOT = Path(__file__).parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before anything imports one
os.environ["KVWEAVE_HOME"] = "/nonexistent/tests-name-their-own-home"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a shell's background jobs, and inherited by processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def script(monkeypatch):
    """A script of lab/experiments/ or docs/ by its name."""
    for folder in ("lab/experiments", "lab/pages"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return importlib.import_module


@pytest.fixture
def documents(tmp_path):
    """A copy of three sample documents that a test may change."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for name in ("passwords.md", "badges.txt", "supper.md"):
        (folder / name).write_text((DOCUMENTS / name).read_text())
    return folder
