"""Python programs in processes of their own, forked from one that has loaded what takes seconds to import."""

import atexit
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

PRELOADED = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "sentence_transformers",
    "sklearn",
    "lance_namespace",
    "pyarrow.dataset",
    "typer",
    "rich.console",
)
"""Libraries alone, none of which starts a thread: every process imports kvweave itself, under its own environment."""


def child_processes() -> multiprocessing.context.ForkServerContext:
    """Return the way to start processes: forked from a server without threads, so quickly and safely."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


class Program:
    """Runs `python WORDS…`: -m MODULE, -c CODE or a file, and arguments. Like `subprocess.Popen` with three pipes of text.

    A test of what is imported, or of how long it takes, needs `subprocess` itself.
    """

    def __init__(
        self, words: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        context = child_processes()
        theirs_in, ours_in = context.Pipe(duplex=False)
        ours_out, theirs_out = context.Pipe(duplex=False)
        ours_err, theirs_err = context.Pipe(duplex=False)
        theirs = theirs_in, theirs_out, theirs_err
        self._process = context.Process(
            target=_run,
            args=([str(word) for word in words], dict(env or os.environ), str(cwd or Path.cwd()), *theirs),
        )
        self._process.start()
        for pipe in theirs:
            pipe.close()
        self.stdin = _text(ours_in, "w")
        self.stdout = _text(ours_out, "r")
        self.stderr = _text(ours_err, "r")
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal; raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Write `text`, and return all that the process prints until it ends; kills it when the time is over."""
        found = {}

        def read(name: str) -> None:
            found[name] = getattr(self, name).read()

        readers = [threading.Thread(target=read, args=(name,)) for name in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        with suppress(BrokenPipeError):
            self.stdin.write(text)
            self.stdin.close()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
        return found["stdout"], found["stderr"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self.stdout, self.stderr, self.stdin):
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.join()


def run_program(
    words: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    input_text: str = "",
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a Program to its end. Like `subprocess.run` with `capture_output` and `text`."""
    with Program(words, env, cwd) as program:
        out, errors = program.communicate(input_text, timeout)
        return subprocess.CompletedProcess(list(words), program.wait(), out, errors)


def _text(pipe: Connection, mode: str) -> io.TextIOWrapper:
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()), mode)


def _run(words: list[str], environment: dict[str, str], folder: str, *pipes: Connection) -> None:
    """Become the program, in the forked process."""
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        match words:
            case ["-m", module, *rest]:
                sys.argv = [module, *rest]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", code, *rest]:
                sys.argv = ["-c", *rest]
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            case [file, *rest]:
                sys.argv = [file, *rest]
                sys.path.insert(0, str(Path(file).parent))
                runpy.run_path(file, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
