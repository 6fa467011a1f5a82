"""`kvweave bench store`: loading stored chunk KV cold and warm, compared with plain reads, and placing it in a prompt.

Every round measures each thing once, so that a slow phase of the machine affects all of them. Files are dropped from the
page cache by posix_fadvise. Where the kernel ignores that, as for files in memory, cold reads are as fast as warm ones,
and the figures show it. Look-ups are timed in a catalogue of many entries that have rows but no files.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvweave.database import Database
from kvweave.errors import InvalidRequest
from kvweave.kvstore.catalog import Catalog, NewEntry
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import EntryKey, digest_tokens, quantised
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.recipes.prepare import quantise_kv
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave.types import ChunkKV, KVProvenance, Storage
from kvweave_lab.bench.measurement import MedianRange, elapsed_s, paired_ratios, read_files, read_mapped
from kvweave_lab.results_log import dtype_name

LOOK_UPS = 1000
_CATALOG_PROVENANCE = KVProvenance("isolated", ("0" * 32,))
_TOKENS, _BYTES = 512, 6_000_000
_PROVENANCE = KVProvenance("bare", ())


@dataclass(frozen=True, slots=True)
class CatalogSpeed:
    """`look_up_s`: seconds of one look-up of `spans` randomly drawn entries among `entries`."""

    entries: int
    spans: int
    look_ups: int
    look_up_s: MedianRange


@dataclass(frozen=True, slots=True)
class StoreSpeed:
    """One storage's figures for one context, in seconds over several rounds.

    Attributes:
        storage: exact, int8 or int4.
        bytes: of the entry files.
        plain_cold_s: reading the files one after the other, with none of them in the page cache.
        cold_s: looking entries up, mapping and verifying every layer, with no file in the page cache.
        first_layer_s: the part of `cold_s` until the first layer of every chunk is usable.
        plain_warm_s: mapping the files and reading every byte, from the page cache.
        warm_s: looking entries up, mapping and verifying every layer, from the page cache.
        place_s: unpacking, rotating and placing every layer in a prompt.
        cold_throughput: share of the plain read's throughput, 0..1: plain_cold_s / cold_s.
        warm_slowdown: warm_s / plain_warm_s.
        of_prefill: (cold_s + place_s) / full prefill of as many tokens; None where that was not measured.
    """

    storage: Storage
    bytes: int
    plain_cold_s: MedianRange
    cold_s: MedianRange
    first_layer_s: MedianRange
    plain_warm_s: MedianRange
    warm_s: MedianRange
    place_s: MedianRange
    cold_throughput: MedianRange
    warm_slowdown: MedianRange
    of_prefill: MedianRange | None


@dataclass(frozen=True, slots=True)
class StoreBench:
    """Everything that was measured. `full_s` and `catalog` are None if they were left out."""

    model: str
    dtype: str
    context_tokens: int
    chunk_tokens: int
    rounds: int
    full_s: MedianRange | None
    catalog: CatalogSpeed | None
    storages: tuple[StoreSpeed, ...]


def bench_store(
    adapter: Adapter,
    folder: Path,
    storages: Sequence[Storage],
    *,
    context_tokens: int,
    chunk_tokens: int,
    rounds: int,
    full_rounds: int,
    catalog_entries: int,
    progress: Progress = no_progress,
) -> StoreBench:
    """Measure a context's chunk KV in a store under `folder`; cold reads measure the disk of that folder.

    The KV is random, in the model's shape. In `full_rounds` rounds, full prefill of as many tokens is timed too. The same
    number of chunks is looked up in a catalogue of `catalog_entries`. 0 leaves either out. Raises InvalidRequest for a
    context that is not made of whole chunks, and for one with more chunks than catalogue entries.
    """
    if context_tokens % chunk_tokens or context_tokens < chunk_tokens:
        raise InvalidRequest(
            f"a context of {context_tokens} tokens is not made of chunks of {chunk_tokens}; give a multiple"
        )
    count = context_tokens // chunk_tokens
    if 0 < catalog_entries < count:
        raise InvalidRequest(
            f"a catalogue of {catalog_entries} entries does not have {count} to look up; give more, or 0 to leave it out"
        )
    chunks = [random_chunk(adapter, number, chunk_tokens) for number in range(count)]
    benches = [_StorageBench(adapter, folder / storage, storage, chunks) for storage in storages]
    full: list[float] = []
    for number in range(rounds):
        for bench in benches:
            bench.round(plain_first=number % 2 == 0)
        if number < full_rounds:
            full.append(_full_prefill_s(adapter, chunks))
        progress("rounds", number + 1, rounds)
    full_s = MedianRange.of(full) if full else None
    catalog = None
    if catalog_entries:
        catalog = bench_catalog(
            folder / "many",
            entries=catalog_entries,
            spans=count,
            progress=lambda done: progress("catalogue", done, catalog_entries),
        )
    return StoreBench(
        model=adapter.fingerprint.name,
        dtype=dtype_name(adapter),
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
        rounds=rounds,
        full_s=full_s,
        catalog=catalog,
        storages=tuple(bench.speed(full_s) for bench in benches),
    )


class _StorageBench:
    """The context in one storage, and the times of all rounds by name."""

    def __init__(self, adapter: Adapter, folder: Path, storage: Storage, chunks: Sequence[ChunkKV]) -> None:
        self._adapter, self._folder, self._storage = adapter, folder, storage
        self._wanted = [(chunk.token_ids, [quantised(_PROVENANCE, storage)]) for chunk in chunks]
        self._times: dict[str, list[float]] = {}
        with self._store() as store:
            for chunk in chunks:
                kv, (provenance,) = quantise_kv(chunk, storage), self._wanted[0][1]
                store.put(adapter.fingerprint, kv, provenance, [digest_tokens(chunk.token_ids)])
        self._files = sorted(folder.glob("??/*.safetensors"))

    def round(self, *, plain_first: bool) -> None:
        """Measure each thing once; rounds alternate which read comes first."""
        cold = [self._plain_cold, self._cold]
        for step in cold if plain_first else reversed(cold):
            self._drop_pages()
            step()
        warm = [self._plain_warm, self._warm]
        for step in warm if plain_first else reversed(warm):
            step()

    def speed(self, full_s: MedianRange | None) -> StoreSpeed:
        """Return the figures of all rounds."""
        times = self._times
        loaded = [cold + place for cold, place in zip(times["cold"], times["place"], strict=True)]
        return StoreSpeed(
            storage=self._storage,
            bytes=sum(file.stat().st_size for file in self._files),
            plain_cold_s=MedianRange.of(times["plain cold"]),
            cold_s=MedianRange.of(times["cold"]),
            first_layer_s=MedianRange.of(times["first layer"]),
            plain_warm_s=MedianRange.of(times["plain warm"]),
            warm_s=MedianRange.of(times["warm"]),
            place_s=MedianRange.of(times["place"]),
            cold_throughput=paired_ratios(times["plain cold"], times["cold"]),
            warm_slowdown=paired_ratios(times["warm"], times["plain warm"]),
            of_prefill=MedianRange.of(time / full_s.median for time in loaded) if full_s else None,
        )

    def _record(self, name: str, seconds: float) -> None:
        self._times.setdefault(name, []).append(seconds)

    def _store(self) -> ChunkStore:
        """Open a store that has read nothing yet."""
        return ChunkStore(self._folder, limit_bytes=2**62)

    def _drop_pages(self) -> None:
        with self._store() as store:
            store.forget_recent()

    def _plain_cold(self) -> None:
        self._record("plain cold", elapsed_s(lambda: read_files(self._files)))

    def _cold(self) -> None:
        with self._store() as store:
            began = time.perf_counter()
            found = self._look_up(store)
            for chunk in found:
                chunk.layer(0)
            self._record("first layer", time.perf_counter() - began)
            for chunk in found:
                verify_content(chunk)
            self._record("cold", time.perf_counter() - began)

    def _plain_warm(self) -> None:
        self._record("plain warm", elapsed_s(lambda: read_mapped(self._files)))

    def _warm(self) -> None:
        with self._store() as store:
            began = time.perf_counter()
            found = self._look_up(store)
            for chunk in found:
                verify_content(chunk)
            self._record("warm", time.perf_counter() - began)
            self._record("place", elapsed_s(lambda: _place(self._adapter, found)))

    def _look_up(self, store: ChunkStore) -> list[ChunkKV]:
        found = store.find(self._adapter.fingerprint, self._wanted)
        assert all(
            one is not None for one in found
        )  # stored by the constructor, and no other process uses the folder
        return [one[0] for one in found if one is not None]


def random_chunk(adapter: Adapter, number: int, tokens: int) -> ChunkKV:
    """Return a chunk of random token ids and KV in the model's shape; `number` is the seed."""
    g = adapter.geometry
    generator = torch.Generator().manual_seed(number)
    kv = torch.randn(g.layers, 2, g.kv_heads, tokens, g.head_width, generator=generator).to(g.dtype)
    ids = torch.randint(3, adapter.model.config.vocab_size, (tokens,), generator=generator)
    return ChunkKV(tuple(ids.tolist()), kv)


def _place(adapter: Adapter, chunks: Sequence[ChunkKV]) -> None:
    """Place all chunks one after the other, layer by layer, as a request's pass does."""
    spans, start = [], 0
    for chunk in chunks:
        spans.append(PlacedSpan(chunk, start, start))
        start += chunk.tokens
    kv_cache = adapter.new_cache(start, spans)
    g = adapter.geometry
    like = torch.empty(1, g.kv_heads, 0, g.head_width, dtype=g.dtype, device=g.device)
    for layer in range(g.layers):
        kv_cache.layer_kv(layer, like)
    adapter.synchronize()


def _full_prefill_s(adapter: Adapter, chunks: Sequence[ChunkKV]) -> float:
    """Return the seconds of a full prefill of the same tokens, up to the first token's logits."""
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    began = time.perf_counter()
    adapter.compute(adapter.new_cache(len(ids)), ids, adapter.rows(torch.arange(len(ids))))
    adapter.synchronize()
    return time.perf_counter() - began


def bench_catalog(folder: Path, *, entries: int, spans: int, progress: Callable[[int], None]) -> CatalogSpeed:
    """Fill a catalogue in `folder` and time look-ups of `spans` entries, of which there must be at least as many."""
    database = Database(folder / "catalog.sqlite")
    try:
        catalog = Catalog(database)
        keys = _fill(database, catalog, entries, progress)
        draw = random.Random(0)

        def look_up(wanted: list[str]) -> float:
            taken_s = elapsed_s(lambda: catalog.paths(wanted))
            assert (
                len(catalog.paths(wanted)) == spans
            )  # they were inserted above, and no other process uses the folder
            return taken_s

        look_up(keys[:spans])  # one-time work of the process
        taken = MedianRange.of(look_up(draw.sample(keys, spans)) for _ in range(LOOK_UPS))
    finally:
        database.close()
    return CatalogSpeed(entries, spans, LOOK_UPS, taken)


def _fill(database: Database, catalog: Catalog, entries: int, progress: Callable[[int], None]) -> list[str]:
    """Insert entries, each of its own chunk, in one transaction; return their keys."""
    keys = []
    with database.transaction():
        for number in range(entries):
            if number % 1000 == 0:
                progress(number)
            chunk = f"{number:032x}"
            key = EntryKey("default", "0" * 32, chunk, _CATALOG_PROVENANCE)
            catalog.insert(NewEntry(key, "none", _TOKENS, _BYTES, f"{number}.safetensors", [chunk]))
            keys.append(key.digest)
    return keys
