"""The command line, run in the tests' process or in one of its own."""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from unittest import mock

import pytest

from support.processes import run_program


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


@pytest.fixture
def command(environment):
    """The command line in this process: the same code as a real command, without its seconds of imports."""
    return Command(environment, run_here)


@pytest.fixture
def real_command(environment):
    """The real command, in a process of its own."""
    return Command(environment, run_process)


def run_process(words, environment, input_text, timeout_s):
    return run_program(["-m", "kvweave", *words], environment, input_text=input_text, timeout=timeout_s)


def run_here(words, environment, input_text, timeout_s):
    from kvweave.cli.app import main

    encoding = environment.get("PYTHONIOENCODING", "utf-8")  # the interpreter reads it when it starts
    out, errors = io.TextIOWrapper(io.BytesIO(), encoding), io.StringIO()
    handler = logging.StreamHandler(errors)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    code = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(mock.patch.object(sys, "argv", ["kvweave", *words]))
        stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO(input_text)))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(library_verbosity())
        logging.getLogger().addHandler(handler)
        stack.callback(logging.getLogger().removeHandler, handler)
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    out.flush()
    return subprocess.CompletedProcess(words, code, out.buffer.getvalue().decode(encoding), errors.getvalue())


@contextlib.contextmanager
def library_verbosity():
    """Restore what a command sets for its process."""
    from transformers.utils import logging as library

    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    try:
        yield
    finally:
        library.set_verbosity(level)
        (library.enable_progress_bar if bars else library.disable_progress_bar)()
