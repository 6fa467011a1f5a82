"""How fast stored chunk KV is there: loading it cold and warm, beside plain reads of the same bytes, and placing it.

Every round measures each thing once, in turn, so that what slows the machine for a while slows all of them. Files are
put out of the page cache by asking the kernel to drop them (posix_fadvise); where it does not, as with files in
memory, cold reads are as fast as warm ones, which the figures then show.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvweave.engine.state import Progress
from kvweave.errors import InvalidRequest
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.kvstore.format import verify_content
from kvweave.kvstore.keys import digest_tokens, quantised
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.recipes.prepare import packed
from kvweave.types import ChunkKV, KVProvenance, Storage
from kvweave_lab.bench.catalog import CatalogSpeed, bench_catalog
from kvweave_lab.bench.plain_reads import read_files, read_mapped
from kvweave_lab.bench.spread import Spread, ratios, timed

_MADE = KVProvenance("bare", ())


@dataclass(frozen=True, slots=True)
class StoreSpeed:
    """One storage's figures for one context; seconds, from several rounds.

    Attributes:
        storage: exact, int8 or int4.
        bytes: of the entry files.
        plain_cold_s: reading them one after the other, out of the page cache.
        cold_s: looking them up, mapping and verifying every layer, out of the page cache.
        first_layer_s: of that, until the first layer of every chunk can be used.
        plain_warm_s: mapping them and reading every byte, from the page cache.
        warm_s: looking them up, mapping and verifying every layer, from the page cache.
        place_s: unpacking, rotating and laying out every layer in a prompt.
        cold_throughput: of the plain read, 0..1: plain_cold_s / cold_s.
        warm_slowdown: warm_s / plain_warm_s.
        of_prefill: (cold_s + place_s) / full prefill of as many tokens; None where that was not measured.
    """

    storage: Storage
    bytes: int
    plain_cold_s: Spread
    cold_s: Spread
    first_layer_s: Spread
    plain_warm_s: Spread
    warm_s: Spread
    place_s: Spread
    cold_throughput: Spread
    warm_slowdown: Spread
    of_prefill: Spread | None


@dataclass(frozen=True, slots=True)
class StoreBench:
    """What was measured: a model's shape, a context in chunks, so many rounds; `full_s`, `catalog`: None if left out."""

    model: str
    dtype: str
    context_tokens: int
    chunk_tokens: int
    rounds: int
    full_s: Spread | None
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
    progress: Progress = lambda stage, done, of: None,
) -> StoreBench:
    """Measure a context's chunk KV in a store under `folder`, whose disk is what cold reads are about.

    The KV is random, in the model's shape. `full_rounds` full prefills of as many tokens are timed among the others'
    rounds; as many chunks are looked up in a catalogue of `catalog_entries`. 0 leaves either out. Raises InvalidRequest for
    a context that is not made of whole chunks, or of more than the catalogue has entries.
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
    chunks = [_chunk(adapter, number, chunk_tokens) for number in range(count)]
    benches = [_Bench(adapter, folder / storage, storage, chunks) for storage in storages]
    full: list[float] = []
    for number in range(rounds):
        for bench in benches:
            bench.round(plain_first=number % 2 == 0)
        if number < full_rounds:
            full.append(_full_prefill_s(adapter, chunks))
        progress("rounds", number + 1, rounds)
    full_s = Spread.of(full) if full else None
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
        dtype=str(adapter.geometry.dtype).removeprefix("torch."),
        context_tokens=context_tokens,
        chunk_tokens=chunk_tokens,
        rounds=rounds,
        full_s=full_s,
        catalog=catalog,
        storages=tuple(bench.speed(full_s) for bench in benches),
    )


class _Bench:
    """The context stored in one way, and the times of its rounds by name."""

    def __init__(self, adapter: Adapter, folder: Path, storage: Storage, chunks: Sequence[ChunkKV]) -> None:
        self._adapter, self._folder, self._storage = adapter, folder, storage
        self._wanted = [(chunk.token_ids, [quantised(_MADE, storage)]) for chunk in chunks]
        self._times: dict[str, list[float]] = {}
        with self._store() as store:
            for chunk in chunks:
                kv, (provenance,) = packed(chunk, storage), self._wanted[0][1]
                store.put(adapter.fingerprint, kv, provenance, [digest_tokens(chunk.token_ids)])
        self._files = sorted(folder.glob("??/*.safetensors"))

    def round(self, *, plain_first: bool) -> None:
        """Each thing once; who reads first changes from round to round."""
        cold = [self._plain_cold, self._cold]
        for step in cold if plain_first else reversed(cold):
            self._drop_pages()
            step()
        warm = [self._plain_warm, self._warm]
        for step in warm if plain_first else reversed(warm):
            step()

    def speed(self, full_s: Spread | None) -> StoreSpeed:
        """The figures of all rounds."""
        times = self._times
        loaded = [cold + place for cold, place in zip(times["cold"], times["place"], strict=True)]
        return StoreSpeed(
            storage=self._storage,
            bytes=sum(file.stat().st_size for file in self._files),
            plain_cold_s=Spread.of(times["plain cold"]),
            cold_s=Spread.of(times["cold"]),
            first_layer_s=Spread.of(times["first layer"]),
            plain_warm_s=Spread.of(times["plain warm"]),
            warm_s=Spread.of(times["warm"]),
            place_s=Spread.of(times["place"]),
            cold_throughput=ratios(times["plain cold"], times["cold"]),
            warm_slowdown=ratios(times["warm"], times["plain warm"]),
            of_prefill=Spread.of(time / full_s.median for time in loaded) if full_s else None,
        )

    def _note(self, name: str, seconds: float) -> None:
        self._times.setdefault(name, []).append(seconds)

    def _store(self) -> ChunkStore:
        """A store that has read nothing yet."""
        return ChunkStore(self._folder, limit_bytes=2**62)

    def _drop_pages(self) -> None:
        with self._store() as store:
            store.forget_recent()

    def _plain_cold(self) -> None:
        self._note("plain cold", timed(lambda: read_files(self._files)))

    def _cold(self) -> None:
        with self._store() as store:
            began = time.perf_counter()
            found = self._find(store)
            for chunk in found:
                chunk.layer(0)
            self._note("first layer", time.perf_counter() - began)
            for chunk in found:
                verify_content(chunk)
            self._note("cold", time.perf_counter() - began)

    def _plain_warm(self) -> None:
        self._note("plain warm", timed(lambda: read_mapped(self._files)))

    def _warm(self) -> None:
        with self._store() as store:
            began = time.perf_counter()
            found = self._find(store)
            for chunk in found:
                verify_content(chunk)
            self._note("warm", time.perf_counter() - began)
            self._note("place", timed(lambda: _place(self._adapter, found)))

    def _find(self, store: ChunkStore) -> list[ChunkKV]:
        found = store.find(self._adapter.fingerprint, self._wanted)
        assert all(one is not None for one in found)  # it was put here, and nobody else knows the folder
        return [one[0] for one in found if one is not None]


def _chunk(adapter: Adapter, number: int, tokens: int) -> ChunkKV:
    g = adapter.geometry
    generator = torch.Generator().manual_seed(number)
    kv = torch.randn(g.layers, 2, g.kv_heads, tokens, g.head_width, generator=generator).to(g.dtype)
    ids = torch.randint(3, adapter.model.config.vocab_size, (tokens,), generator=generator)
    return ChunkKV(tuple(ids.tolist()), kv)


def _place(adapter: Adapter, chunks: Sequence[ChunkKV]) -> None:
    """Lay all chunks out one behind the other, as a request does layer by layer when its pass reaches it."""
    spans, start = [], 0
    for chunk in chunks:
        spans.append(PlacedSpan(chunk, start, start))
        start += chunk.tokens
    kv_cache = adapter.new_cache(start, spans)
    g = adapter.geometry
    like = torch.empty(1, g.kv_heads, 0, g.head_width, dtype=g.dtype, device=g.device)
    for layer in range(g.layers):
        kv_cache.held_keys(layer, like)
    adapter.synchronize()


def _full_prefill_s(adapter: Adapter, chunks: Sequence[ChunkKV]) -> float:
    """Of the same tokens, up to the first token's logits."""
    ids = tuple(token for chunk in chunks for token in chunk.token_ids)
    began = time.perf_counter()
    adapter.compute(adapter.new_cache(len(ids)), ids, adapter.rows(torch.arange(len(ids))))
    adapter.synchronize()
    return time.perf_counter() - began
