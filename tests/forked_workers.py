"""Workers of pytest-xdist, forked from one process that has imported the tests. Each would take 20 s to import them itself.

Where xdist starts a Python for a worker, it starts this file, which hands the worker's pipes to that process.
"""

import atexit
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path


def start(config):
    """Start the process that imports the tests of `config`; return the command that xdist runs as a worker's Python."""
    folder = tempfile.TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    address = Path(folder.name, "workers")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(listener.fileno()), *config.args],
            stdin=subprocess.PIPE,  # it ends when this is closed
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    config.add_cleanup(process.communicate)
    return f"{sys.executable} -I -S {__file__} {address}"


def hand_over(address):
    """Let a worker have this process's pipes, and wait until it has ended."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"pipes"], [0, 1, 2])
        server.recv(1)


def serve(listener, arguments):
    """Import the tests that `arguments` name, and fork a worker for each connection until stdin is closed."""
    from multiprocessing import forkserver, resource_tracker

    import pytest

    from processes import child_processes

    child_processes()
    forkserver.ensure_running()  # all workers' programs come from this one, which none of them can wait for
    forkserver.ensure_running = forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    # Not captured: some modules keep the standard error that they were imported with, and it must stay open.
    pytest.main([*arguments, "--collect-only", "-qqq", "-p", "no:cacheprovider", "--capture=no"])
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection = listener.accept()[0]
        pipes = socket.recv_fds(connection, 16, 3)[1]
        with warnings.catch_warnings(action="ignore"):
            worker = os.fork()  # lancedb and Python 3.12 warn of its threads, which do nothing yet
        if not worker:
            listener.close()
            _work(pipes)  # the connection stays open until the worker ends
            break
        connection.close()
        for pipe in pipes:
            os.close(pipe)
    atexit._run_exitfuncs()
    os._exit(0)  # what libraries say of their objects in a process's last moments is of no use


def _work(pipes):
    """Become the worker: what xdist would have started with `python -c`."""
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(eval(sys.stdin.readline()), vars(main))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--serve", number, *arguments]:
            serve(socket.socket(fileno=int(number)), arguments)
        case [address, *_]:
            hand_over(address)
