"""Python programs in processes of their own, forked from one that has loaded what takes seconds to import."""

import atexit
import gc
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
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE
from types import TracebackType
from typing import IO, Any, Self

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
    "fastapi",
    "prometheus_client",
    "mcp.server.mcpserver",
    "kvweave.cli.app",
    "kvweave.decode.handoff",
    "kvweave.knowledge_base",
    "kvweave.models.loading",
    "kvweave.recipes.methods",
    "kvweave.recipes.offline",
)
"""None of them starts a thread, as lancedb does, nor keeps what it finds in the environment."""
IMPORTED_BY_TESTS = (
    "hypothesis",
    "langchain_openai",
    "llama_index.core",
    "moto",
    "openpyxl",
    "playwright.sync_api",
)
"""What takes the processes that run tests long to import beside those, nor starts a thread; missing ones are passed over."""


def child_processes() -> multiprocessing.context.ForkServerContext:
    """Return the way to start processes: forked from a server without threads, so quickly and safely."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def start_server(*more: str) -> str:
    """Start the server from which processes are forked; return its address, for other processes to use it.

    If it does not run yet, it imports these modules too.
    """
    child_processes().set_forkserver_preload([*PRELOADED, *more])
    forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address


def use_server(address: str) -> None:
    """From now on, fork processes from the server that another process has started and outlives this one."""
    server = forkserver._forkserver
    server._forkserver_address = address
    # Any file: the server ends with the process that started it.
    server._forkserver_alive_fd = os.open(os.devnull, os.O_WRONLY)
    server.ensure_running = forkserver.ensure_running = resource_tracker.ensure_running


class Program:
    """Runs `python WORDS…`: -m MODULE, -c CODE or a file, and arguments. Like `subprocess.Popen` with three pipes of text.

    `stdin`, `stdout` and `stderr` may be DEVNULL or a binary file, as there; what is no pipe is None here.
    A test of what is imported, or of how long it takes, needs `subprocess` itself.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[bytes] = PIPE,
        stdout: int | IO[bytes] = PIPE,
        stderr: int | IO[bytes] = PIPE,
    ) -> None:
        theirs_in, self.stdin = _ends(stdin, "w")
        theirs_out, self.stdout = _ends(stdout, "r")
        theirs_err, self.stderr = _ends(stderr, "r")
        theirs = theirs_in, theirs_out, theirs_err
        self._process = child_processes().Process(
            target=_run,
            args=([str(word) for word in words], dict(env or os.environ), str(cwd or Path.cwd()), *theirs),
        )
        self._process.start()
        for pipe in theirs:
            pipe.close()
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

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self.returncode

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, text: str = "", timeout: float | None = None) -> tuple[str, str]:
        """Write `text`, and return all that the process prints until it ends; kills it when the time is over.

        All three must be pipes.
        """
        found = {}

        def read(name: str) -> None:
            with getattr(self, name) as pipe:
                found[name] = pipe.read()

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
                if pipe is not None:
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


def python_program(command: Sequence[str], env: Mapping[str, str] | None = None, **given: Any) -> Program:
    """Start a command that begins with `sys.executable`: stands in for `subprocess.Popen` in a module of the lab."""
    assert command[0] == sys.executable, command
    words = command[2:] if command[1] == "-P" else command[1:]  # the tests' folder holds no modules
    given = {name: given.get(name) for name in ("stdin", "stdout", "stderr", "cwd")}
    return Program(words, env, **given)


def _ends(given: int | IO[bytes], mode: str) -> tuple[Connection, io.TextIOWrapper | None]:
    """Return the program's end of a pipe and ours, opened in `mode`; its end alone where it is a file."""
    if given == PIPE:
        reader, writer = multiprocessing.Pipe(duplex=False)
        theirs, ours = (writer, reader) if mode == "r" else (reader, writer)
        with ours:
            return theirs, os.fdopen(os.dup(ours.fileno()), mode)
    file = os.open(os.devnull, os.O_RDWR) if isinstance(given, int) else os.dup(given.fileno())
    return Connection(file), None


def _run(words: list[str], environment: dict[str, str], folder: str, *pipes: Connection) -> None:
    """Become the program, in the forked process."""
    gc.freeze()  # half a million objects of the preloaded libraries, which no collection need visit
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
