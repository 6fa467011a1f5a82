"""Entries for the tests, made from a seed so that any process can make the same ones."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kvweave.database import Database
from kvweave.files import write_atomically
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import Content, OnDamage, check_entry, open_entry
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.ops.quantise import quantise
from kvweave.types import ChunkFeature, ChunkKV, KVProvenance, ModelFingerprint, Storage

SYSTEM = "5" * 32
ISOLATED = KVProvenance("isolated", (SYSTEM,))
DIGEST = KVProvenance("digest-12", (SYSTEM,), exact=False)


def fingerprint(digest: str = "a" * 32, name: str = "tiny") -> ModelFingerprint:
    return ModelFingerprint(name, "weights", "tokenizer", "rope", "float32", digest)


MODEL = fingerprint()


def chunk(seed: int, tokens: int = 5, dtype: torch.dtype = torch.float32, layers: int = 2) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(layers, 2, 1, tokens, 4, generator=generator).to(dtype)
    return ChunkKV(tuple(range(seed * 1000, seed * 1000 + tokens)), kv)


def quantised_chunk(
    seed: int, storage: Storage, tokens: int = 5, like: torch.Tensor | None = None
) -> ChunkKV:
    """`chunk(seed, tokens)`, or the tensor given, in fewer bits."""
    exact = chunk(seed, tokens)
    return ChunkKV(exact.token_ids, quantise(exact.kv if like is None else like, storage))


def feature(seed: int, tokens: int = 5) -> ChunkFeature:
    """A feature of `chunk(seed, tokens)`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "kept": torch.arange(0, tokens, 2, dtype=torch.int32),
        "moved": torch.randn(2, tokens, generator=generator),
        "scale": torch.tensor(seed / 3, dtype=torch.bfloat16),
        "mask": torch.ones(tokens, dtype=torch.uint8),
    }
    return ChunkFeature(tuple(range(seed * 1000, seed * 1000 + tokens)), tensors)


def put(store: ChunkStore, kv: ChunkKV, provenance: KVProvenance = ISOLATED, *context_chunks: str) -> bool:
    return store.put(MODEL, kv, provenance, [digest_tokens(kv.token_ids), *context_chunks])


def listed(store: ChunkStore, *chunks: ChunkKV) -> list[bool]:
    return store.has_many(MODEL, [(digest_tokens(kv.token_ids), ISOLATED) for kv in chunks])


def get(store: ChunkStore, kv: ChunkKV, provenance: KVProvenance = ISOLATED) -> ChunkKV | None:
    return store.get(MODEL, kv.token_ids, provenance)


def same(found: ChunkKV | None, expected: ChunkKV) -> bool:
    return (
        found is not None
        and found.token_ids == expected.token_ids
        and found.kv.dtype == expected.kv.dtype
        and torch.equal(found.kv, expected.kv)
    )


def put_feature(
    store: ChunkStore, one: ChunkFeature, provenance: KVProvenance = DIGEST, *context_chunks: str
) -> bool:
    return store.put(MODEL, one, provenance, [digest_tokens(one.token_ids), *context_chunks])


def get_feature(
    store: ChunkStore, one: ChunkFeature, provenance: KVProvenance = DIGEST
) -> ChunkFeature | None:
    return store.find_features(MODEL, [(one.token_ids, provenance)])[0]


def same_feature(found: ChunkFeature | None, expected: ChunkFeature) -> bool:
    return (
        found is not None
        and found.token_ids == expected.token_ids
        and found.tensors.keys() == expected.tensors.keys()
        and all(
            found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor)
            for name, tensor in expected.tensors.items()
        )
    )


def write_entry(path: Path, parts: Sequence[bytes | memoryview]) -> None:
    write_atomically(path, parts)


def read_entry(
    path: Path, key: EntryKey, token_ids: Sequence[int], on_damage: OnDamage = lambda reason: None
) -> Content:
    """The content of the entry at `path`, which must have this key and these tokens."""
    entry = open_entry(path, on_damage)
    check_entry(entry, key.digest, token_ids, path)
    return entry.content


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    """The SQL statements that are sent inside the block, by one thread at a time."""
    sent: list[str] = []
    with database._session() as session:
        connection = session.connection  # the next statement takes the one that was left last
    connection.set_trace_callback(sent.append)
    yield sent
    connection.set_trace_callback(None)


def key_of(store: ChunkStore, tokens: str, provenance: KVProvenance) -> EntryKey:
    """Return the key under which a store has the KV of these tokens, named by their digest."""
    return EntryKey(store.namespace, MODEL.digest, tokens, provenance)


def entry_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.safetensors"))


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Whether this holds at some moment from now on: for work in the background."""
    deadline = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.005)
    return holds()


def write_range(folder: str, seeds: list[int], limit_bytes: int) -> None:
    """Put entries, read and remove some in between, while other processes do the same."""
    torch.set_num_threads(1)
    with ChunkStore(folder, limit_bytes=limit_bytes) as store:
        for seed in seeds:
            kv = chunk(seed)
            assert put(store, kv)
            found = get(store, kv)
            assert found is None or same(found, kv)  # the other process may have evicted or removed it
            store.own(f"document {seed % 7}", [digest_tokens(kv.token_ids)])
            if seed % 10 == 9:
                store.disown(f"document {seed % 7}")
