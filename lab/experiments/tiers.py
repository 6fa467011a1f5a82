"""How fast a context's chunk KV comes out of each tier, beside a plain transfer of the same bytes, interleaved.

    .venv/bin/python lab/experiments/tiers.py --output lab/results/tiers.json
    .venv/bin/python lab/experiments/tiers.py --tier redis://127.0.0.1:6379/0 --tier s3://bucket/prefix --storage int8

A round fetches every chunk once as a look-up does: the bytes, a copy of its own, every checksum. Into memory that is the way up, from
then on an entry is used where it lies. Where machines share, the same chunks are also looked up by a store that has nothing itself, all
at once, which can use the first layers while the others are coming: until it can, and until all are there. The plain transfer beside it is, for memory, a copy; for a folder, reading the files, which both
ways come out of the page cache (out of the disk: `kvweave bench store`); for a server, asking its own client for the bytes and doing nothing with them. Of a server the figures say as much about the network as about this program. KV is random, in the shape of a model; what is
put under a namespace of its own is deleted again.
"""

import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import encode_entry, parse_entry, verify_content
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised
from kvweave.kvstore.tiers.factory import open_shared
from kvweave.kvstore.tiers.memory import HostTier
from kvweave.kvstore.tiers.tier import RemoteTier, owned_copy
from kvweave.recipes.prepare import packed
from kvweave.types import STORAGES, ChunkKV, KVProvenance, ModelFingerprint, Storage
from kvweave_lab.bench.spread import Spread, ratios, timed
from measured import arguments, circumstances, command_of, keep, numbers, started

SHAPE = (24, 2, 2, 64)  # layers, keys and values, KV heads, head width: 12 KiB per token in bfloat16
MADE = KVProvenance("bare", ())
Wanted: TypeAlias = list[tuple[tuple[int, ...], list[KVProvenance]]]
MODEL = ModelFingerprint("random", "", "", "", "bfloat16", "0" * 32)
NAMESPACE = f"bench-{secrets.token_hex(4)}"


def ids_of(number: int, chunk_tokens: int) -> tuple[int, ...]:
    """The tokens of a chunk."""
    return tuple(range(number * chunk_tokens, (number + 1) * chunk_tokens))


def entries(chunks: int, chunk_tokens: int, storage: Storage) -> dict[str, bytes]:
    """Random KV of so many chunks in the stored format, by key."""
    made = {}
    for number in range(chunks):
        layers, both, heads, width = SHAPE
        kv = torch.randn(layers, both, heads, chunk_tokens, width).bfloat16()
        chunk = packed(ChunkKV(ids_of(number, chunk_tokens), kv), storage)
        key = EntryKey(NAMESPACE, MODEL.digest, digest_tokens(chunk.token_ids), quantised(MADE, storage))
        made[key.digest] = b"".join(encode_entry(key, "random", chunk, []).parts)
    return made


def fetched(tier: RemoteTier, keys: Sequence[str]) -> None:
    """What a look-up does with each entry."""
    for key in keys:
        verify_content(parse_entry(owned_copy(tier.get_many([key])[key]), key).content)


def fetched_into(memory: HostTier, data: dict[str, bytes]) -> None:
    """What is done with each entry once, on its way up to memory."""
    memory.residents.drop(data)
    for key, blob in data.items():
        memory.admit(key, blob, 0.0)


def plain(tier: RemoteTier, keys: Sequence[str], folder: Path) -> Callable[[], object]:
    """The same bytes, with nothing done to them."""
    files = {path.name: path for path in folder.rglob("*") if path.is_file()}
    if files:
        return lambda: [files[key].read_bytes() for key in keys]
    return lambda: [tier.get_many([key]) for key in keys]


def measure(
    fetch: Callable[[], object], beside: Callable[[], object], rounds: int, size: int
) -> dict[str, object]:
    """Fetch everything so many times, in turn with the plain transfer."""
    plain_s, fetch_s = [], []
    for number in range(rounds + 1):  # the first round is not counted
        steps = [(beside, plain_s), (fetch, fetch_s)]
        for step, times in steps if number % 2 else steps[::-1]:
            times.append(timed(step))
    return {
        "bytes": size,
        "plain_s": numbers(Spread.of(plain_s[1:])),
        "fetch_s": numbers(Spread.of(fetch_s[1:])),
        "throughput_of_plain": numbers(ratios(plain_s[1:], fetch_s[1:])),
    }


def looked_up(url: str, wanted: Wanted, rounds: int) -> dict[str, object]:
    """Look everything up so many times, on machines that have nothing: until the first layers can be used, and all."""
    first_s, all_s = [], []
    for _ in range(rounds + 1):  # the first round is not counted
        with (
            tempfile.TemporaryDirectory() as folder,
            ChunkStore(folder, namespace=NAMESPACE, shared=url, limit_bytes=0) as store,
            store.lease() as lease,
        ):
            store.get(MODEL, (0,), MADE)  # which is not there, and has the connection made
            began = time.perf_counter()
            found = [one[0] for one in store.find(MODEL, wanted, lease) if one is not None]
            for chunk in found:
                chunk.layer(0)
            first_s.append(time.perf_counter() - began)
            for chunk in found:
                verify_content(chunk)
            all_s.append(time.perf_counter() - began)
            assert len(found) == len(wanted)
    return {
        "first_layer_s": numbers(Spread.of(first_s[1:])),
        "all_layers_s": numbers(Spread.of(all_s[1:])),
    }


def of_memory(data: dict[str, bytes], rounds: int) -> dict[str, object]:
    """The host's memory."""
    size = sum(map(len, data.values()))
    memory = HostTier(2 * size)
    return measure(
        partial(fetched_into, memory, data),
        lambda: [owned_copy(blob) for blob in data.values()],
        rounds,
        size,
    )


def of_place(
    url: str, data: dict[str, bytes], wanted: Wanted, rounds: int, folder: Path
) -> dict[str, object]:
    """What is at an address: put everything, fetch it, look it up, and delete it again."""
    tier = open_shared(url, NAMESPACE)
    keys = list(data)

    def put() -> None:
        for key in keys:
            tier.put(key, data[key])

    put_s = timed(put)
    size = sum(map(len, data.values()))
    measured = measure(partial(fetched, tier, keys), plain(tier, keys, folder), rounds, size)
    measured |= looked_up(url, wanted, rounds)
    tier.delete(keys)
    tier.close()
    return {"put_s": put_s, **measured}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--tier", action="append", help="host, folder, or the address of a shared tier; repeatable"
    )
    parser.add_argument("--storage", action="append", choices=STORAGES, help="repeatable; default all")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    names, storages = given.tier or ["host", "folder"], given.storage or list(STORAGES.values())
    figures = []
    for storage in storages:
        chunks = given.context_tokens // given.chunk_tokens
        data = entries(chunks, given.chunk_tokens, storage)
        provenance = quantised(MADE, storage)
        wanted = [(ids_of(number, given.chunk_tokens), [provenance]) for number in range(chunks)]
        for name in names:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                if name == "host":
                    measured = of_memory(data, given.rounds)
                else:
                    url = f"file://{folder}" if name == "folder" else name
                    measured = of_place(url, data, wanted, given.rounds, folder)
                figures.append({"tier": name.partition(":")[0], "storage": storage, **measured})
    keep({**circumstances(command_of(given)), "tiers": figures}, given.output)


if __name__ == "__main__":
    started(main)
