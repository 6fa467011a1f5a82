"""Measures how fast a context's chunk KV is loaded from each tier, relative to a plain transfer of the same bytes.

    .venv/bin/python lab/experiments/tiers.py --output lab/results/tiers.json
    .venv/bin/python lab/experiments/tiers.py --tier redis://127.0.0.1:6379/0 --tier s3://bucket/prefix --storage int8

A round fetches every chunk once, like a look-up: its bytes, a copy, and every checksum. For memory, this is the promotion
of an entry, which later look-ups use in place. For a shared tier, an empty store also looks up all chunks at once: the
times until the first layers and all layers can be used. The plain transfer is a copy for memory, reading the files for a
folder, and a fetch by the server's own client for a server; both ways alternate. Files come from the page cache; for the
disk, see `kvweave bench store`. A server's numbers depend on the network as much as on kvweave. KV is random, in the shape
of a model. Entries have a namespace of their own and are deleted at the end.
"""

import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from experiment import argument_parser, command_of, environment, median_and_range, run_script, write_result
from kvweave.kvstore.chunk_store import ChunkStore, open_remote_tier
from kvweave.kvstore.format import ParsedEntry, encode_entry, parse_entry, verify_content
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised
from kvweave.kvstore.tiers.memory import HostTier
from kvweave.kvstore.tiers.tier import RemoteTier, owned_copy
from kvweave.recipes.prepare import quantise_kv
from kvweave.types import STORAGES, ChunkKV, KVProvenance, ModelFingerprint, Storage
from kvweave_lab.bench.measurement import MedianRange, elapsed_s, paired_ratios

SHAPE = (24, 2, 2, 64)  # layers, keys and values, KV heads, head width: 12 KiB per token in bfloat16
PROVENANCE = KVProvenance("bare", ())
Wanted: TypeAlias = list[tuple[tuple[int, ...], list[KVProvenance]]]
MODEL = ModelFingerprint("random", "", "", "", "bfloat16", "0" * 32)
NAMESPACE = f"bench-{secrets.token_hex(4)}"


def ids_of(number: int, chunk_tokens: int) -> tuple[int, ...]:
    """Return the token ids of a chunk."""
    return tuple(range(number * chunk_tokens, (number + 1) * chunk_tokens))


def entries(chunks: int, chunk_tokens: int, storage: Storage) -> dict[str, bytes]:
    """Return the random KV of chunks in the stored format, by key."""
    blobs = {}
    for number in range(chunks):
        layers, both, heads, width = SHAPE
        kv = torch.randn(layers, both, heads, chunk_tokens, width).bfloat16()
        chunk = quantise_kv(ChunkKV(ids_of(number, chunk_tokens), kv), storage)
        key = EntryKey(
            NAMESPACE, MODEL.digest, digest_tokens(chunk.token_ids), quantised(PROVENANCE, storage)
        )
        blobs[key.digest] = b"".join(encode_entry(key, "random", chunk, []))
    return blobs


def fetch_each(tier: RemoteTier, keys: Sequence[str]) -> None:
    """Fetch and verify each entry like a look-up."""
    for key in keys:
        verify_content(parse_entry(owned_copy(tier.get_many([key])[key]), key).content)


def admit_each(memory: HostTier, parsed: Sequence[ParsedEntry]) -> None:
    """Admit each entry into empty memory."""
    memory.clear()
    for entry in parsed:
        memory.admit(entry, 0.0)


def plain_transfer(tier: RemoteTier, keys: Sequence[str], folder: Path) -> Callable[[], object]:
    """Return a function that reads the same bytes without processing them."""
    files = {path.name: path for path in folder.rglob("*") if path.is_file()}
    if files:
        return lambda: [files[key].read_bytes() for key in keys]
    return lambda: [tier.get_many([key]) for key in keys]


def measure(
    fetch: Callable[[], object], plain: Callable[[], object], rounds: int, size: int
) -> dict[str, object]:
    """Return the times of fetching everything and of the plain transfer, which alternate."""
    plain_s, fetch_s = [], []
    for number in range(rounds + 1):  # the first round warms up
        steps = [(plain, plain_s), (fetch, fetch_s)]
        for step, times in steps if number % 2 else steps[::-1]:
            times.append(elapsed_s(step))
    return {
        "bytes": size,
        "plain_s": median_and_range(MedianRange.of(plain_s[1:])),
        "fetch_s": median_and_range(MedianRange.of(fetch_s[1:])),
        "throughput_of_plain": median_and_range(paired_ratios(plain_s[1:], fetch_s[1:])),
    }


def look_up(url: str, wanted: Wanted, rounds: int) -> dict[str, object]:
    """Return the times until an empty store can use the first layers of all chunks, and all layers."""
    first_s, all_s = [], []
    for _ in range(rounds + 1):  # the first round warms up
        with (
            tempfile.TemporaryDirectory() as folder,
            ChunkStore(folder, namespace=NAMESPACE, shared=url, limit_bytes=0) as store,
            store.lease() as lease,
        ):
            store.get(MODEL, (0,), PROVENANCE)  # a miss, which opens the connection
            start = time.perf_counter()
            found = [one[0] for one in store.find(MODEL, wanted, lease) if one is not None]
            for chunk in found:
                chunk.layer(0)
            first_s.append(time.perf_counter() - start)
            for chunk in found:
                verify_content(chunk)
            all_s.append(time.perf_counter() - start)
            assert len(found) == len(wanted)
    return {
        "first_layer_s": median_and_range(MedianRange.of(first_s[1:])),
        "all_layers_s": median_and_range(MedianRange.of(all_s[1:])),
    }


def measure_memory(data: dict[str, bytes], rounds: int) -> dict[str, object]:
    """Return the times of the host's memory."""
    size = sum(map(len, data.values()))
    memory = HostTier(2 * size)
    parsed = [parse_entry(owned_copy(blob), key) for key, blob in data.items()]
    return measure(
        partial(admit_each, memory, parsed),
        lambda: [owned_copy(blob) for blob in data.values()],
        rounds,
        size,
    )


def measure_shared(
    url: str, data: dict[str, bytes], wanted: Wanted, rounds: int, folder: Path
) -> dict[str, object]:
    """Return the times of a shared tier: put, fetch and look up everything, then delete it."""
    tier = open_remote_tier(url, NAMESPACE)
    keys = list(data)

    def put() -> None:
        for key in keys:
            tier.put(key, data[key])

    put_s = elapsed_s(put)
    size = sum(map(len, data.values()))
    times = measure(partial(fetch_each, tier, keys), plain_transfer(tier, keys, folder), rounds, size)
    times |= look_up(url, wanted, rounds)
    tier.delete(keys)
    tier.close()
    return {"put_s": put_s, **times}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--tier",
        action="append",
        help="host, folder, or the address of a shared tier; repeatable; default host and folder",
    )
    parser.add_argument("--storage", action="append", choices=STORAGES, help="repeatable; default all")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    names, storages = args.tier or ["host", "folder"], args.storage or list(STORAGES.values())
    rows = []
    for storage in storages:
        chunks = args.context_tokens // args.chunk_tokens
        data = entries(chunks, args.chunk_tokens, storage)
        provenance = quantised(PROVENANCE, storage)
        wanted = [(ids_of(number, args.chunk_tokens), [provenance]) for number in range(chunks)]
        for name in names:
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                if name == "host":
                    times = measure_memory(data, args.rounds)
                else:
                    url = f"file://{folder}" if name == "folder" else name
                    times = measure_shared(url, data, wanted, args.rounds, folder)
                rows.append({"tier": name.partition(":")[0], "storage": storage, **times})
    write_result({**environment(command_of(args)), "tiers": rows}, args.output)


if __name__ == "__main__":
    run_script(main)
