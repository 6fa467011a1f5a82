"""How many processes run the tests, how they collect them, and the one process from which they and their programs are forked."""

import gc
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.machine import cpu_limits
from support.processes import IMPORTED_BY_TESTS, start_server, use_server


@pytest.hookimpl(optionalhook=True)  # as the next one: a hook of pytest-xdist, and tests run without it too
def pytest_xdist_auto_num_workers():
    """One process more than cores: tests of servers, browsers and killed processes wait for much of their time."""
    return min(4, cpu_limits().threads + 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Each process that runs tests is forked as well: what all of them import is imported once."""
    launcher = Path(__file__).with_name("forked_worker.py")
    for spec in specs:
        spec.python = shlex.join([sys.executable, str(launcher), start_server(*IMPORTED_BY_TESTS)])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["server"] = start_server()


def pytest_configure(config):
    if hasattr(config, "workerinput"):
        use_server(config.workerinput["server"])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while all modules are imported, nor later among what they and the tests have made.

    These are a million objects that live as long as the process: each look at them takes a good part of a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
