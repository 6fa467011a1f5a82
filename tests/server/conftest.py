import pytest

from kvweave.samples import DOCUMENTS
from kvweave.server.serving import serving
from support.fake_serving import FakeServing
from support.running_server import server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server with the shipped model and a knowledge base `notes` over two sample documents."""
    home = tmp_path_factory.mktemp("served") / "home"
    with server(
        home, ping_s=5.0
    ) as running:  # an error that a slow machine finds late still has its own status
        running.http.post("/v1/kb", json={"name": "notes"}).raise_for_status()
        files = [
            ("files", (name, (DOCUMENTS / name).read_bytes())) for name in ("passwords.md", "badges.txt")
        ]
        running.http.post("/v1/kb/notes/documents", files=files).raise_for_status()
        yield running


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Runs servers over an engine that a test controls; attributes of FakeServing are given as `engine`."""
    monkeypatch.setattr(serving, "Serving", FakeServing)

    def run(*, engine=None, **settings):
        for name, value in (engine or {}).items():
            monkeypatch.setattr(FakeServing, name, value)
        return server(tmp_path / "home", **settings)

    return run
