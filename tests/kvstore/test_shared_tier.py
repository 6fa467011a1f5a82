"""Several machines on one shared tier, each with its own store and catalogue."""

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvweave.errors import InvalidRequest, MissingExtra
from kvweave.kvstore.chunk_store import ChunkStore, open_remote_tier
from kvweave.kvstore.keys import digest_tokens
from kvweave.kvstore.tiers import circuit_breaker
from kvweave.types import KVProvenance
from support.store_samples import (
    ISOLATED,
    MODEL,
    SYSTEM,
    chunk,
    eventually,
    feature,
    fingerprint,
    get,
    get_feature,
    key_of,
    listed,
    put,
    put_feature,
    same,
    same_feature,
)
from support.tier_servers import BUCKET, Server, make_bucket, redis_server, s3_environment, s3_server


class Machines:
    """Opens stores in separate folders, on one shared tier and in one namespace."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.namespace = secrets.token_hex(8)

    def store(self, name: str, **more: object) -> ChunkStore:
        settings: dict[str, object] = {"namespace": self.namespace, "shared": self.url} | more
        return ChunkStore(self.folder / name, **settings)  # type: ignore[arg-type]

    def held(self) -> dict[str, int]:
        """Return the entries that the tier itself reports."""
        tier = open_remote_tier(self.url, self.namespace)
        sizes = dict(tier.sizes())
        tier.close()
        return sizes


@pytest.fixture(params=["redis", "s3"])
def machines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machines:
    server: Server = request.getfixturevalue(request.param)
    if request.param == "redis":
        return Machines(tmp_path, f"redis://127.0.0.1:{server.port}/0")
    for variable, value in s3_environment(server).items():
        monkeypatch.setenv(variable, value)
    return Machines(tmp_path, f"s3://{BUCKET}/prefix")


@pytest.fixture
def folder(tmp_path: Path) -> Machines:
    """Machines that share a folder, for tests that do not depend on the server."""
    return Machines(tmp_path, f"file://{tmp_path}/shared")


def test_an_entry_of_one_machine_is_found_and_stored_by_another(machines: Machines) -> None:
    kv, about = chunk(1, tokens=50), feature(2)
    with machines.store("first") as first:
        put(first, kv)
        put_feature(first, about)
    with machines.store("second") as second:
        assert listed(second, kv) == [False]
        assert same(get(second, kv), kv)
        assert same_feature(get_feature(second, about), about)
        assert eventually(lambda: listed(second, kv) == [True])
        assert get(second, chunk(3)) is None
        second.forget_recent()
        assert same(get(second, kv), kv)
        by_tier = second.stats().by_tier
        assert (by_tier["shared"].hits, by_tier["disk"].hits) == (2, 1)
        assert (second.stats().hits, second.stats().misses) == (3, 1)
        assert by_tier["shared"].waiting == 0  # imported entries are not sent back


def test_only_the_same_namespace_model_and_provenance_is_found(machines: Machines) -> None:
    kv = chunk(1)
    with machines.store("first") as first:
        put(first, kv)
    with machines.store("second") as second, machines.store("third", namespace="other") as third:
        assert get(third, kv) is None
        assert second.get(fingerprint("b" * 32), kv.token_ids, ISOLATED) is None
        assert get(second, kv, KVProvenance("observed", (SYSTEM, "7" * 32))) is None
        assert same(get(second, kv), kv)


def test_damage_in_the_shared_tier_is_a_counted_logged_miss_and_is_replaced(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    kv = chunk(1)
    with machines.store("first") as first:
        put(first, kv)
    ((key, size),) = machines.held().items()
    tier = open_remote_tier(machines.url, machines.namespace)
    altered = bytearray(tier.get_many([key])[key])
    altered[-3] ^= 16
    tier.put(key, altered)
    with machines.store("second") as second:
        with caplog.at_level(logging.WARNING, "kvweave"):
            assert get(second, kv) is None
        assert "altered in layer 1" in caplog.text
        assert second.stats().damaged == 1
        assert tier.sizes() == {}
        put(second, kv)
        assert eventually(lambda: dict(tier.sizes()) == {key: size})
    with machines.store("third") as third:
        assert same(get(third, kv), kv)
    tier.close()


def test_verify_finds_damaged_and_unknown_entries_in_the_shared_tier(machines: Machines) -> None:
    with machines.store("first") as first, machines.store("second") as second:
        for seed in range(3):
            put(first, chunk(seed))
        assert eventually(lambda: first.stats().by_tier["shared"].waiting == 0)
        tier = open_remote_tier(machines.url, machines.namespace)
        damaged = min(machines.held())
        tier.put(damaged, b"anything")
        report = second.verify()
        assert (report.shared_checked, len(report.shared_damaged), report.sound) == (3, 1, False)
        assert report.shared_reconciled == 2  # the second machine had not listed it yet
        assert second.stats().by_tier["shared"].entries == len(machines.held()) == 2
        report = first.verify("shared")
        assert (report.checked, report.shared_checked, report.shared_reconciled) == (0, 2, 1)
        assert report.sound
        tier.close()


def test_the_cap_of_the_shared_tier_holds_and_frequently_used_entries_stay(machines: Machines) -> None:
    with machines.store("first") as first:
        put(first, chunk(0))
        assert eventually(lambda: first.stats().by_tier["shared"].entries == 1)
        (size,) = machines.held().values()
        first.set_limit(3 * size + size // 2, "shared")
        for _ in range(5):
            get(first, chunk(0))
        first.stats()  # writes the counts
        for seed in range(1, 8):
            put(first, chunk(seed))
            assert eventually(lambda: first.stats().by_tier["shared"].waiting == 0)
            assert sum(machines.held().values()) <= 3 * size + size // 2
        found = first.tiers.shared
        assert found is not None
        assert first.stats().by_tier["shared"].entries == len(machines.held()) == 3
        hot = key_of(first, digest_tokens(chunk(0).token_ids), ISOLATED).digest
        assert hot in machines.held()
        first.set_limit(size, "shared")
        assert machines.held().keys() == {hot}
        assert first.clear("shared") == 1
        assert machines.held() == {}
        assert same(get(first, chunk(0)), chunk(0))  # the disk still has it


# Removal


def test_entries_made_from_a_removed_document_are_deleted_from_the_shared_tier(machines: Machines) -> None:
    a, b = (digest_tokens(chunk(seed).token_ids) for seed in (1, 2))
    with machines.store("first", owned_only=True) as first:
        first.own("one", [a])
        first.own("two", [b])
        put(first, chunk(1))
        put(first, chunk(2))
        put(
            first, chunk(2), KVProvenance("similar-10", (SYSTEM,), exact=False), a
        )  # with a neighbour that belongs to "one"
        assert eventually(lambda: len(machines.held()) == 3)
        assert first.disown("one") == 2
        assert eventually(lambda: len(machines.held()) == 1)
        assert same(get(first, chunk(2)), chunk(2))
        assert get(first, chunk(1)) is None


def test_entries_made_from_chunks_without_an_owner_here_are_not_used(folder: Machines) -> None:
    a, b = (digest_tokens(chunk(seed).token_ids) for seed in (1, 2))
    similar = KVProvenance("similar-10", (SYSTEM,), exact=False)
    with folder.store("first", owned_only=True) as first:
        first.own("one", [a, b])
        put(first, chunk(2), similar, a)
        put(first, chunk(2))
    with folder.store("second", owned_only=True) as second:
        second.own("two", [b])
        assert get(second, chunk(2), similar) is None
        assert same(get(second, chunk(2)), chunk(2))
        assert second.import_entries(MODEL, [(chunk(2).token_ids, similar)]) == [False]
        second.own("one", [a])
        assert same(get(second, chunk(2), similar), chunk(2))


def test_a_removal_while_the_server_is_down_is_replicated_later(tmp_path: Path) -> None:
    a = digest_tokens(chunk(1).token_ids)
    with redis_server(tmp_path / "server") as server:
        machines = Machines(tmp_path, f"redis://127.0.0.1:{server.port}/0")
        with machines.store("first") as first:
            first.own("one", [a])
            put(first, chunk(1))
        server.kill()
        with machines.store("first") as first:
            assert first.disown("one") == 1
        server.start()
        assert len(machines.held()) == 1
        with machines.store("first") as first:
            assert eventually(lambda: machines.held() == {})
            assert eventually(lambda: first.stats().by_tier["shared"].entries == 0)


# Importing, and the tiers in between


def test_importing_copies_entries_to_this_disk(machines: Machines) -> None:
    with machines.store("first") as first:
        put(first, chunk(1))
    with machines.store("second") as second:
        wanted = [(chunk(seed).token_ids, ISOLATED) for seed in (1, 2)]
        assert second.import_entries(MODEL, wanted) == [True, False]
        assert listed(second, chunk(1), chunk(2)) == [True, False]
        assert (second.stats().hits, second.stats().misses) == (0, 0)
        assert second.verify().sound


def test_a_fetched_entry_that_does_not_fit_on_the_disk_is_served_from_memory(folder: Machines) -> None:
    kv = chunk(1, tokens=100)
    with folder.store("first") as first:
        put(first, kv)
    with folder.store("second", limit_bytes=100, host_bytes=10**6) as second:
        assert same(get(second, kv), kv)
        assert eventually(lambda: second.stats().by_tier["host"].entries == 1)
        assert same(get(second, kv), kv)
        assert listed(second, kv) == [False]
        assert second.stats().entries == 0
        with folder.store("first") as first:
            first.clear("shared")
        assert get(second, kv) is None  # nothing lists it any more, so the copy in memory does not count


@pytest.mark.parametrize("removed", [False, True])
def test_an_evicted_entry_of_the_shared_tier_is_stored_once_the_disk_has_space(
    folder: Machines, removed: bool
) -> None:
    kv = chunk(1, tokens=100)
    with folder.store("first") as first:
        put(first, kv)
    with folder.store("second", limit_bytes=100, host_bytes=10**6) as second:
        get(second, kv)
        assert eventually(lambda: second.stats().by_tier["host"].entries == 1)
        second.set_limit(10**6)
        if removed:
            with folder.store("first") as first:
                first.clear("shared")
        second.set_limit(0, "host")
        assert listed(second, kv) == [not removed]


def test_a_full_disk_is_one_warning_for_computed_and_fetched_entries_together(
    folder: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with folder.store("first") as first:
        put(first, chunk(1))
    with folder.store("second") as second, caplog.at_level(logging.WARNING, "kvweave"):
        monkeypatch.setattr(second.capacity, "disk_has_room", lambda needed_bytes: False)
        assert not put(second, chunk(2))
        assert same(get(second, chunk(1)), chunk(1))
        second.tiers.fetcher.close()  # waits for background work
        assert listed(second, chunk(1)) == [False]
    assert [record.getMessage().count("the disk is full") for record in caplog.records] == [1]


def test_a_prefetched_entry_is_not_fetched_again(folder: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder.store("first") as first:
        put(first, chunk(1))
    with folder.store("second") as second:
        shared = second.tiers.shared
        assert shared is not None
        fetch, fetched = shared.reader.fetch, []
        monkeypatch.setattr(
            shared.reader, "fetch", lambda *given, **more: (fetched.append(1), fetch(*given, **more))[1]
        )
        with second.lease() as lease:
            second.prefetch(MODEL, [(digest_tokens(chunk(1).token_ids), [ISOLATED])], lease)
            best = KVProvenance("observed", (SYSTEM, "7" * 32))
            found = second.find(MODEL, [(chunk(1).token_ids, [best, ISOLATED])], lease)[0]
            assert found is not None
            assert same(found[0], chunk(1))
            assert found[1] is ISOLATED
        assert len(fetched) == 2  # the better provenance, which is stored nowhere, and this one


# Outages


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_S", 0.2)


@pytest.fixture(params=["redis", "s3"])
def mortal(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Server, Machines]]:
    """A server that the test may kill, and machines on it."""
    if request.param == "redis":
        with redis_server(tmp_path / "server") as server:
            yield server, Machines(tmp_path, f"redis://127.0.0.1:{server.port}/0")
        return
    with s3_server(tmp_path / "server") as server:
        for variable, value in s3_environment(server).items():
            monkeypatch.setenv(variable, value)
        yield server, Machines(tmp_path, f"s3://{BUCKET}/prefix")


def test_a_server_that_dies_costs_one_warning_and_is_used_again_when_it_is_back(
    mortal: tuple[Server, Machines], short_pauses: None, caplog: pytest.LogCaptureFixture
) -> None:
    server, machines = mortal
    with caplog.at_level(logging.INFO, "kvweave"), machines.store("first") as first:
        put(first, chunk(1))
        assert eventually(lambda: first.stats().by_tier["shared"].waiting == 0)
        server.kill()
        for seed in range(2, 6):
            assert get(first, chunk(seed)) is None
            assert put(first, chunk(seed))
            assert same(get(first, chunk(seed)), chunk(seed))
        assert "does not answer" in first.stats().by_tier["shared"].state
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert warnings[0].getMessage().startswith("shared tier not used until it works again")
        server.start()
        if machines.url.startswith("s3"):
            make_bucket(server)
        assert eventually(lambda: first.stats().by_tier["shared"].waiting == 0)
        assert "works again" in caplog.text
        warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(warnings) == 1
        with machines.store("second") as second:
            assert same(get(second, chunk(4)), chunk(4))


def test_a_dead_server_is_tried_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counts the attempts: each failure is followed by a pause twice as long as the one before."""
    now = [0.0]
    tier = open_remote_tier("redis://127.0.0.1:1/0", "default")
    tried: list[str] = []
    get_many = tier.get_many
    monkeypatch.setattr(tier, "get_many", lambda keys: (tried.append(keys), get_many(keys))[1])
    guard = circuit_breaker.CircuitBreaker(tier, clock=lambda: now[0])
    for tenth in range(1000):
        now[0] = tenth / 10
        assert guard.get_many(["a"]) == {}
        assert not (guard.is_open and guard.put("a", b"b"))
    assert len(tried) == 7  # at 0, 1, 3, 7, 15, 31 and 63 s
    assert len(caplog.records) == 1
    guard.close()


def test_the_next_process_resumes_the_replication_queue(tmp_path: Path) -> None:
    with redis_server(tmp_path / "server") as server:
        machines = Machines(tmp_path, f"redis://127.0.0.1:{server.port}/0")
        server.kill()
        with machines.store("first") as first:
            put(first, chunk(1))
            assert first.stats().by_tier["shared"].waiting == 1
        server.start()
        machines.store("first").close()
        assert len(machines.held()) == 1


def test_a_new_shared_tier_gets_all_entries(folder: Machines) -> None:
    with folder.store("first", shared=None) as first:
        put(first, chunk(1))
        assert first.stats().by_tier["shared"].state == "none"
        with pytest.raises(InvalidRequest, match="no shared tier"):
            first.clear("shared")
    for place in ("shared", "elsewhere"):
        folder.url = f"file://{folder.folder}/{place}"
        folder.store("first").close()
        assert len(folder.held()) == 1


@pytest.mark.parametrize(("url", "package"), [("redis://host", "redis"), ("s3://bucket", "obstore")])
def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, package: str
) -> None:
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match="pip install 'kvweave"):
        ChunkStore(tmp_path, shared=url)
