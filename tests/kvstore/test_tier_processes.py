"""Processes that are killed while they use a shared tier, and two that use one folder and one tier at once."""

import random
import secrets
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from kvweave.kvstore.chunk_store import ChunkStore, open_remote_tier
from support.processes import child_processes
from support.store_samples import chunk, get, listed, put, same
from support.tier_servers import Server

KILLS = 8
TIGHT_BYTES, TIGHT_SHARED_BYTES = 40_000, 60_000
ROOMY_BYTES = 100_000_000  # where nothing is evicted


def publish_forever(
    folder: str,
    namespace: str,
    url: str,
    limits: tuple[int, int],
    first_seed: int,
    acknowledgements: Connection,
) -> None:
    torch.set_num_threads(1)
    disk, there = limits
    with ChunkStore(folder, namespace=namespace, shared=url, limit_bytes=disk, shared_bytes=there) as store:
        for seed in range(first_seed, first_seed + 100_000):
            if put(store, chunk(seed)):
                acknowledgements.send(seed)
            get(store, chunk(seed - 20))  # evicted here by now, and fetched


def use_together(folder: str, namespace: str, url: str, seeds: list[int]) -> None:
    torch.set_num_threads(1)
    with ChunkStore(folder, namespace=namespace, shared=url, limit_bytes=15_000) as store:
        for seed in seeds:
            assert put(store, chunk(seed))
            for earlier in (seed, seed // 2, seed + 1):
                found = get(store, chunk(earlier))
                assert found is None or same(found, chunk(earlier))


def acknowledged_until_killed(
    folder: Path, namespace: str, url: str, limits: tuple[int, int], first_seed: int, after_s: float
) -> list[int]:
    """The seeds that a process had stored when it was killed, some seconds after its first."""
    context = child_processes()
    ours, theirs = context.Pipe(duplex=False)
    arguments = (str(folder), namespace, url, limits, first_seed, theirs)
    child = context.Process(target=publish_forever, args=arguments)
    child.start()
    theirs.close()
    seeds = [ours.recv()]
    time.sleep(after_s)
    child.kill()
    child.join()
    with suppress(EOFError, OSError):
        while True:
            seeds.append(ours.recv())
    ours.close()
    child.close()
    return seeds


def test_after_kills_no_partial_entry_is_read_and_the_queue_is_resumed(redis: Server, tmp_path: Path) -> None:
    namespace, url = secrets.token_hex(8), f"redis://127.0.0.1:{redis.port}/0"
    one, moments = tmp_path / "one", random.Random(5)
    tight = (TIGHT_BYTES, TIGHT_SHARED_BYTES)
    for kill in range(KILLS):
        seeds = acknowledged_until_killed(one, namespace, url, tight, kill * 100_000, moments.uniform(0, 0.2))
        with ChunkStore(one) as store:  # the catalogue is sound after every kill
            assert store.verify().sound
            assert store.used_bytes <= TIGHT_BYTES
    with ChunkStore(tmp_path / "two", namespace=namespace, shared=url) as other:
        report = other.verify()
        assert report.sound
        assert report.shared_checked > 0
        found = [get(other, chunk(seed)) for seed in seeds]
        assert all(kv is None or same(kv, chunk(seed)) for seed, kv in zip(seeds, found, strict=True))
    tier = open_remote_tier(url, namespace)
    assert sum(tier.sizes().values()) <= TIGHT_SHARED_BYTES
    tier.close()
    # Where nothing is evicted, everything acknowledged is there, and the next process resumes the queue.
    roomy = (ROOMY_BYTES, ROOMY_BYTES)
    seeds = acknowledged_until_killed(one, namespace, url, roomy, KILLS * 100_000, 0.1)
    with ChunkStore(one, namespace=namespace, shared=url) as store:
        assert listed(store, *map(chunk, seeds)) == [True] * len(seeds)
    with ChunkStore(tmp_path / "two", namespace=namespace, shared=url) as other:
        assert all(same(get(other, chunk(seed)), chunk(seed)) for seed in seeds)


def test_two_processes_on_one_folder_and_one_tier_agree(redis: Server, tmp_path: Path) -> None:
    namespace, url = secrets.token_hex(8), f"redis://127.0.0.1:{redis.port}/0"
    context = child_processes()
    seeds = list(range(40))
    children = [
        context.Process(target=use_together, args=(str(tmp_path), namespace, url, order))
        for order in (seeds, seeds[::-1])
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    with ChunkStore(tmp_path, namespace=namespace, shared=url) as store:
        report = store.verify()
        assert report.sound
        assert store.used_bytes <= 15_000
        known = store.stats().by_tier["shared"]
        assert report.shared_checked == known.entries
        assert known.waiting == 0
        # Entries that the disk evicted before they were sent are lost, and no others.
        found = [get(store, chunk(seed)) for seed in seeds]
        assert known.entries == sum(kv is not None for kv in found) > 20
        assert all(kv is None or same(kv, chunk(seed)) for seed, kv in zip(seeds, found, strict=True))
