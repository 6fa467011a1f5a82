from collections.abc import Iterator

import pytest

from kvweave.kvstore import chunk_store
from kvweave.kvstore.tiers import circuit_breaker, replication
from support.fake_remote_tier import FakeRemoteTier
from support.streaming_samples import Slowly
from support.tier_servers import Server, redis_server, s3_server


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Redis or Valkey server; each test uses its own namespace."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real S3 server with one bucket."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> FakeRemoteTier:
    """The shared tier of the test's stores; failures are followed by short pauses."""
    tier = FakeRemoteTier()
    monkeypatch.setattr(chunk_store, "open_remote_tier", lambda url, namespace: tier)
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(replication, "RETRY_AFTER_S", 0.01)
    return tier


@pytest.fixture
def slowly(tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slowly]:
    slowly = Slowly(tier, monkeypatch)
    yield slowly
    slowly.go_on.set()
