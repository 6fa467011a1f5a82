from collections.abc import Iterator

import pytest
from arriving_samples import Slowly
from memory_tier import MemoryTier
from tier_servers import Server, redis_server, s3_server

from kvweave.kvstore import parts
from kvweave.kvstore.tiers import circuit_breaker as guarded
from kvweave.kvstore.tiers import replication as errands


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real Redis or Valkey server; what tests put there is told apart by namespaces."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real S3 server with one bucket."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> MemoryTier:
    """What the stores of the test share; failures are followed by short rests."""
    tier = MemoryTier()
    monkeypatch.setattr(parts, "open_shared", lambda url, namespace: tier)
    monkeypatch.setattr(guarded, "FIRST_REST_S", 0.01)
    monkeypatch.setattr(guarded, "LONGEST_REST_S", 0.05)
    monkeypatch.setattr(errands, "LOOK_AGAIN_S", 0.01)
    return tier


@pytest.fixture
def slowly(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slowly]:
    slowly = Slowly(tier, monkeypatch)
    yield slowly
    slowly.go_on.set()
