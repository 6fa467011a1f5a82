"""Fixtures of the lab's tests."""

from multiprocessing import forkserver

import pytest

from processes import child_processes


@pytest.fixture(scope="session", autouse=True)
def one_server_forks():
    """The lab's own processes are forked from the same server as the tests' programs, whichever come first."""
    child_processes()
    forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def coarse_figures():
    """Figures of reports have few pixels: what is checked is where things are in them, and which there are."""
    from kvweave_lab.report import figures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 40)
        yield
