"""A shared tier that can be read but refuses writes: full, read-only, or refusing some entries."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.errors import StoreBusy
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.kvstore.tiers import circuit_breaker
from kvweave.kvstore.tiers.circuit_breaker import CircuitBreaker
from support.fake_remote_tier import FakeRemoteTier, refusing
from support.store_samples import ISOLATED, MODEL, chunk, eventually, get, put, same

READS = ("get_many", "has_many", "sizes")


@pytest.fixture
def store(tier: FakeRemoteTier, tmp_path: Path) -> Iterator[ChunkStore]:
    with ChunkStore(tmp_path / "one", shared="of the test") as store:
        yield store


def key_of(seed: int) -> str:
    tokens = digest_tokens(chunk(seed).token_ids)
    return EntryKey("default", MODEL.digest, tokens, ISOLATED, "kv").digest


def waiting(store: ChunkStore) -> int:
    return store.stats().by_tier["shared"].waiting


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records if record.levelno >= logging.INFO]


def test_a_tier_that_refuses_writes_is_still_read_and_costs_one_warning(
    tier: FakeRemoteTier, store: ChunkStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkStore(tmp_path / "other", shared="of the test") as other:
        put(other, chunk(9))
        assert eventually(lambda: key_of(9) in tier.held)
    caplog.set_level(logging.INFO, "kvweave.kvstore.tiers.circuit_breaker")
    tier.before = refusing("put", "delete")
    for seed in range(4):
        assert put(store, chunk(seed))
    assert eventually(lambda: tier.calls.count("has_many") > 5)  # it was retried several times
    assert same(get(store, chunk(9)), chunk(9))
    assert store.stats().by_tier["shared"].hits == 1
    assert "refuses" in store.stats().by_tier["shared"].state
    assert waiting(store) == 4
    assert levels(caplog) == ["WARNING"]
    tier.before = refusing()
    assert eventually(lambda: waiting(store) == 0)
    assert tier.held.keys() == {key_of(seed) for seed in (0, 1, 2, 3, 9)}
    assert levels(caplog) == ["WARNING", "INFO"]


@pytest.mark.parametrize("first", [True, False])
def test_refused_entries_do_not_delay_others_and_are_skipped_in_the_end(
    first: bool, tier: FakeRemoteTier, store: ChunkStore, caplog: pytest.LogCaptureFixture
) -> None:
    in_order = sorted(range(40), key=key_of)
    too_large = in_order[:20] if first else in_order[20:]  # more than one batch
    tier.before = refusing("put", keys=[key_of(seed) for seed in too_large])
    for seed in in_order:
        put(store, chunk(seed))
    taken = {key_of(seed) for seed in in_order} - {key_of(seed) for seed in too_large}
    assert eventually(lambda: tier.held.keys() == taken)
    # Each is skipped once another entry was accepted after its first refusal.
    assert any(
        put(store, chunk(seed)) and eventually(lambda: waiting(store) == 0, within_s=2)
        for seed in range(100, 140)
    )
    assert tier.held.keys().isdisjoint(key_of(seed) for seed in too_large)
    assert tier.held.keys() >= taken
    assert all(same(get(store, chunk(seed)), chunk(seed)) for seed in too_large)


def test_refused_deletions_do_not_delay_puts(tier: FakeRemoteTier, store: ChunkStore) -> None:
    store.own("document", [digest_tokens(chunk(0).token_ids)])
    put(store, chunk(0))
    assert eventually(lambda: key_of(0) in tier.held)
    tier.before = refusing("delete")
    store.disown("document")
    put(store, chunk(1))
    assert eventually(lambda: key_of(1) in tier.held)
    assert eventually(lambda: waiting(store) == 1)
    tier.before = refusing()
    assert eventually(lambda: tier.held.keys() == {key_of(1)})


def test_puts_and_deletions_have_their_own_circuits(
    tier: FakeRemoteTier,
) -> None:
    now = [0.0]
    guard = CircuitBreaker(tier, clock=lambda: now[0])
    tier.before = refusing("put")
    assert not guard.put("a", b"a")
    assert guard.has_many(["a"]) == frozenset()
    assert guard.delete(["a"])
    assert (guard.is_open, guard.failing, guard.refusing) == (False, False, True)
    tier.before = refusing("put", *READS)
    assert guard.sizes() is None
    assert guard.is_open
    assert not guard.delete(["a"])
    assert tier.calls == ["has_many", "delete"]
    now[0] = 1.0
    tier.before = refusing()
    assert guard.sizes() == {}
    assert guard.put("a", b"a")
    assert not guard.refusing


@pytest.mark.parametrize("too", [False, True])
def test_a_call_that_began_before_a_failure_does_not_change_the_circuit(
    too: bool, tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_S", 60.0)
    now = [0.0]
    guard = CircuitBreaker(tier, clock=lambda: now[0])

    def meanwhile(call: str, keys: object) -> None:
        if call == "has_many":
            assert guard.sizes() is None
        refusing("sizes", *(["has_many"] if too else []))(call, [])

    tier.before = meanwhile
    assert guard.has_many(["a"]) == frozenset()
    assert guard.is_open
    now[0] = 1.0  # the pause of one failure, though both calls may have failed
    assert not guard.is_open
    tier.before = refusing()
    assert guard.sizes() == {}
    assert not guard.failing


def test_refused_writes_are_retried_ever_more_rarely_also_between_reads(
    tier: FakeRemoteTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_S", 60.0)
    now, tried = [0.0], list[float]()
    guard = CircuitBreaker(tier, clock=lambda: now[0])

    def before(call: str, keys: object) -> None:
        if call == "put":
            tried.append(now[0])
            refusing("put")("put", [])

    tier.before = before
    for tenth in range(1000):
        now[0] = tenth / 10
        guard.put("a", b"a")
        assert guard.has_many(["a"]) == frozenset()
        assert not guard.is_open
    assert tried == [0, 1, 3, 7, 15, 31, 63]
    assert len(caplog.records) == 1


def test_a_locked_catalogue_is_retried_without_a_wake_up(
    tier: FakeRemoteTier, store: ChunkStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = store.tiers.shared
    assert shared is not None
    process_queue, refusals = shared.process_queue, [StoreBusy("locked")]

    def locked_once() -> bool:
        if refusals:
            raise refusals.pop()
        return process_queue()

    monkeypatch.setattr(shared, "process_queue", locked_once)
    put(store, chunk(1))
    assert eventually(lambda: waiting(store) == 0, within_s=10)
    assert "not kept in step for now: locked" in caplog.text
