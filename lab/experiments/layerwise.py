"""Compares loading chunk KV layer by layer during the pass with loading whole entries before it.

    .venv/bin/python lab/experiments/layerwise.py --output lab/results/layerwise.json

FusionRAG §4.2 argues for whole entries: if loading takes much longer than computing, layers gain nothing, and each layer
costs another round trip. If loading takes no time, there is nothing to overlap. In between, layers save at most half the
time. So bandwidths are multiples of the *balance*, at which loading takes as long as the pass; it is measured first. The
gain is reported for each bandwidth, round-trip time and share of recomputed tokens.

The link is simulated. A unit, an entry or one layer of it, arrives after the time for its bytes and round trips, of which
several overlap. A loader thread then verifies it, like every look-up. The pass runs in a real shape with random weights
and waits for layers that have not arrived. Both ways alternate. A single request is the best case for layers: a busy
server computes other requests while one loads.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from experiment import command_of, environment, median_and_range, run_script, shape_parser, write_result
from kvweave.kvstore.format import encode_entry, parse_entry
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.kvstore.layers import VerifiedLayers
from kvweave.kvstore.tiers.loading import THREADS
from kvweave.kvstore.tiers.tier import owned_copy
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.types import ChunkKV, KVProvenance
from kvweave_lab.bench.measurement import MedianRange, elapsed_s
from kvweave_lab.bench.store import random_chunk
from kvweave_lab.shapes import random_model

PROVENANCE = KVProvenance("bare", ())
QUESTION_TOKENS = 32
BALANCE_MULTIPLES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0)


@dataclass(frozen=True)
class Link:
    """A network link: `bandwidth` in bytes per second, and a round trip for each fetch."""

    bandwidth: float
    round_trip_s: float

    def transfer_s(self, size_bytes: int) -> float:
        """Return the seconds of one fetch among many; a store's loading threads overlap their round trips."""
        return self.round_trip_s / THREADS + size_bytes / self.bandwidth


class StreamingEntry:
    """KV whose layers arrive one by one; see `kvweave.types.KVLayers`."""

    layer_wait_s = 0.0  # waiting is part of the measured time

    def __init__(self, layers: VerifiedLayers) -> None:
        self.layers = layers
        self.shape, self.dtype, self.nbytes = layers.shape, layers.dtype, layers.nbytes
        self._arrived = [threading.Event() for _ in range(layers.shape[0])]

    def arrive(self, layer: int) -> None:
        """Verify a layer and make it available."""
        self.layers.layer(layer)
        self._arrived[layer].set()

    def load(self, index: int) -> None:
        """Do nothing: only the link loads layers."""

    def layer(self, index: int) -> torch.Tensor:
        self._arrived[index].wait()
        return self.layers.layer(index)

    def all_layers(self) -> torch.Tensor:
        return torch.stack([self.layer(index) for index in range(self.shape[0])])


class Context:
    """A prompt of stored chunks, a share of whose tokens is recomputed, and a question."""

    def __init__(self, adapter: Adapter, tokens: int, chunk_tokens: int, ratio: float) -> None:
        self.adapter = adapter
        self._entries = [_entry(adapter, number, chunk_tokens) for number in range(tokens // chunk_tokens)]
        self.bytes = sum(chunk.nbytes for chunk in self.chunks())
        stored = sum(len(ids) for ids, _ in self._entries)
        generator = torch.Generator().manual_seed(0)
        selected = torch.randperm(stored, generator=generator)[: round(ratio * stored)].sort().values
        self._rows = torch.cat([selected, torch.arange(stored, stored + QUESTION_TOKENS)])
        question = tuple(range(3, 3 + QUESTION_TOKENS))
        self._ids = (*(token for ids, _ in self._entries for token in ids), *question)

    def chunks(self) -> list[StreamingEntry]:
        """Return entries without arrived or verified layers."""
        contents = [parse_entry(owned_copy(data), "entry").content for _, data in self._entries]
        return [StreamingEntry(content.data) for content in contents]  # type: ignore[union-attr, arg-type]

    def compute(self, chunks: Sequence[StreamingEntry]) -> torch.Tensor:
        """Return the first token's logits (1, vocab); waits for layers that have not arrived."""
        spans, start = [], 0
        for (ids, _), chunk in zip(self._entries, chunks, strict=True):
            spans.append(PlacedSpan(ChunkKV(ids, chunk), start, start))
            start += len(ids)
        kv_cache = self.adapter.new_cache(len(self._ids), spans)
        logits = self.adapter.compute(kv_cache, self._ids, self.adapter.rows(self._rows))
        self.adapter.synchronize()
        return logits


def _entry(adapter: Adapter, number: int, tokens: int) -> tuple[tuple[int, ...], bytes]:
    """Return a chunk's token ids, and its random KV in the stored format."""
    chunk = random_chunk(adapter, number, tokens)
    key = EntryKey("bench", adapter.fingerprint.digest, digest_tokens(chunk.token_ids), PROVENANCE)
    return chunk.token_ids, b"".join(encode_entry(key, "random", chunk, []))


def deliver(chunks: Sequence[StreamingEntry], link: Link, by_layer: bool) -> None:
    """Deliver all layers: chunk by chunk, or the first layer of all chunks, then the second, and so on."""
    layers = chunks[0].shape[0]
    all_layers = range(layers)
    units = (
        [(chunk, [layer]) for layer in all_layers for chunk in chunks]
        if by_layer
        else [(chunk, list(all_layers)) for chunk in chunks]
    )
    due = time.perf_counter()
    for chunk, parts in units:
        due += link.transfer_s(chunk.nbytes * len(parts) // layers)
        time.sleep(max(0.0, due - time.perf_counter()))
        for layer in parts:
            chunk.arrive(layer)


def ttft_s(context: Context, link: Link, by_layer: bool) -> float:
    """Return the seconds from the first fetch to the first token's logits."""
    chunks = context.chunks()
    loader = threading.Thread(target=deliver, args=(chunks, link, by_layer))
    start = time.perf_counter()
    loader.start()
    if not by_layer:
        loader.join()
    context.compute(chunks)
    elapsed = time.perf_counter() - start
    loader.join()
    return elapsed


def measure(context: Context, round_trips_s: Sequence[float], rounds: int) -> dict[str, object]:
    """Return the balance, and the times of both ways at multiples of it."""
    chunks = context.chunks()
    deliver(chunks, Link(float("inf"), 0.0), by_layer=False)
    context.compute(chunks)
    pass_s = MedianRange.of(elapsed_s(lambda: context.compute(chunks)) for _ in range(max(3, rounds)))
    balance = context.bytes / pass_s.median
    points = []
    for round_trip_s in round_trips_s:
        for multiple in BALANCE_MULTIPLES:
            link = Link(multiple * balance, round_trip_s)
            whole, layers = [], []
            for number in range(rounds):
                for by_layer in (False, True) if number % 2 else (True, False):
                    (layers if by_layer else whole).append(ttft_s(context, link, by_layer))
            gains = MedianRange.of(1 - layer / one for layer, one in zip(layers, whole, strict=True))
            points.append(
                {
                    "round_trip_s": round_trip_s,
                    "bandwidth": link.bandwidth,
                    "of_balance": multiple,
                    "whole_s": median_and_range(MedianRange.of(whole)),
                    "layers_s": median_and_range(MedianRange.of(layers)),
                    "gain": median_and_range(gains),
                }
            )
    return {"bytes": context.bytes, "pass_s": median_and_range(pass_s), "balance": balance, "points": points}


def main() -> None:
    parser = shape_parser(__doc__, context_tokens=4096)
    parser.add_argument(
        "--ratio", type=float, action="append", help="share of tokens to recompute; default 0 and 0.15"
    )
    parser.add_argument("--round-trip-ms", type=float, action="append", help="default 0 and 5")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ratios, trips = args.ratio or [0.0, 0.15], args.round_trip_ms or [0.0, 5.0]
    adapter = random_model(args.shape)
    contexts = []
    for ratio in ratios:
        context = Context(adapter, args.context_tokens, args.chunk_tokens, ratio)
        contexts.append({"ratio": ratio, **measure(context, [trip / 1e3 for trip in trips], args.rounds)})
    write_result({**environment(command_of(args)), "contexts": contexts}, args.output)


if __name__ == "__main__":
    run_script(main)
