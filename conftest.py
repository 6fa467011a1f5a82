"""Settings and fixtures of all tests, those of kvweave and of its lab."""

import importlib
import os
import signal
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before anything imports one
os.environ["KVWEAVE_HOME"] = "/nonexistent/tests-name-their-own-home"
os.environ["KVWEAVE_WAIT"] = "1"  # no test leaves a process behind that prepares chunks
os.environ |= {  # background work in tests does not wait for the tests beside it
    "KVWEAVE_IDLE_LOAD": "1000",
    "KVWEAVE_IDLE_MEMORY_PRESSURE": "100",
}
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore it, and processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("support.workers", "support.commands", "support.shipped_models")


@pytest.fixture
def script(monkeypatch):
    """A script of lab/experiments or lab/pages by its name."""
    for folder in ("lab/experiments", "lab/pages"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return importlib.import_module


@pytest.fixture
def few_labelled_pairs(monkeypatch):
    """A calibration tries the model as a judge on five pairs: all of them take a tiny model seconds."""
    from kvweave.state import judge

    pairs = judge.labelled_pairs()
    monkeypatch.setattr(judge, "labelled_pairs", lambda: pairs[::60])


@pytest.fixture
def documents(tmp_path):
    """A copy of three sample documents that a test may change."""
    from kvweave.samples import DOCUMENTS

    folder = tmp_path / "documents"
    folder.mkdir()
    for name in ("passwords.md", "badges.txt", "supper.md"):
        (folder / name).write_text((DOCUMENTS / name).read_text())
    return folder


@pytest.fixture(scope="session")
def real_model(request):
    """The real pretrained model of the name that the test is parametrized with; skips where it is not prepared."""
    from kvweave_lab.real_models import MODELS, command, prepared_folder

    model = MODELS[request.param]
    if prepared_folder(model) is None:
        pytest.skip(f"{model.name} is not prepared; run `{command(model)}`")
    return model
