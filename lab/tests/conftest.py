"""Fixtures of the lab's tests."""

import pytest

from support.processes import start_server


@pytest.fixture(scope="session", autouse=True)
def one_server_forks():
    """The lab's own processes are forked from the same server as the tests' programs, whichever come first."""
    start_server()


@pytest.fixture(scope="session", autouse=True)
def coarse_figures():
    """Figures of reports have few pixels: what is checked is where things are in them, and which there are."""
    from kvweave_lab.report import figures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 40)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_bandwidth_trials():
    """Memory bandwidth is measured on little memory: what is checked is where the figure goes."""
    from kvweave_lab.bench import baselines

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "SUMMED_BYTES", 2**22)
        yield


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not drawn, for tests of which files there are; `eval/test_report` and its like draw each of them."""
    from kvweave_lab.report import figures

    monkeypatch.setattr(figures, "to_png", lambda figure: b"\x89PNG")
