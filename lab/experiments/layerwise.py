"""Loading chunk KV layer by layer while it is used, against loading it whole before: where one overtakes the other.

    .venv/bin/python lab/experiments/layerwise.py --output lab/results/layerwise.json

FusionRAG §4.2 argues for whole requests: where loading takes much longer than computing, layers bring nothing, and fetching each on its own
costs a round trip more. The other extreme is the same: what is loaded in no time need not be overlapped. In between, at best, half the
time is saved. So the bandwidths are multiples of the *balance*, at which loading takes as long as the pass, measured first on this machine,
and the gain is given for each, for several round trips and for several shares of the context computed anew.

The link is simulated: bytes of a unit, an entry or one layer of it, are there when so much bandwidth and so many round trips, several of
them under way at once, have delivered them; a loader thread then verifies them as every look-up does. The pass is the model's, in a
real shape with random weights, and waits for a layer that has not come. Both ways alternate. One request alone is the best case for layers: a busy
server computes other requests while one loads.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvweave.kvstore.format import encode_entry, parse_entry
from kvweave.kvstore.header import VerifiedLayers
from kvweave.kvstore.keys import EntryKey, digest_tokens
from kvweave.kvstore.tiers.loading import THREADS
from kvweave.kvstore.tiers.tier import owned_copy
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import PlacedSpan
from kvweave.models.shapes import random_model
from kvweave.types import ChunkKV, KVProvenance
from kvweave_lab.bench.spread import Spread, timed
from measured import arguments, circumstances, command_of, keep, numbers, started

MADE = KVProvenance("bare", ())
QUESTION_TOKENS = 32
OF_BALANCE = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0)


@dataclass(frozen=True)
class Link:
    """Where KV comes from: `bandwidth` in bytes per second, `round_trip_s` for each thing that is asked for."""

    bandwidth: float
    round_trip_s: float

    def takes_s(self, size_bytes: int) -> float:
        """Of one fetch among many: as many round trips as a store has loading threads are under way at once."""
        return self.round_trip_s / THREADS + size_bytes / self.bandwidth


class StreamingEntry:
    """KV whose layers have to come first; see `kvweave.types.KVLayers`."""

    awaited_s = 0.0  # the pass waits, which is what is measured

    def __init__(self, held: VerifiedLayers) -> None:
        self.held = held
        self.shape, self.dtype, self.nbytes = held.shape, held.dtype, held.nbytes
        self._there = [threading.Event() for _ in range(held.shape[0])]

    def arrive(self, layer: int) -> None:
        """Verify a layer and give it out from now on."""
        self.held.layer(layer)
        self._there[layer].set()

    def load(self, index: int) -> None:
        """Nothing ahead of the pass, which is what is measured."""

    def layer(self, index: int) -> torch.Tensor:
        self._there[index].wait()
        return self.held.layer(index)

    def whole(self) -> torch.Tensor:
        return torch.stack([self.layer(index) for index in range(self.shape[0])])


class Context:
    """A prompt of stored chunks and a question, of which a share of the chunks' tokens is computed anew."""

    def __init__(self, adapter: Adapter, tokens: int, chunk_tokens: int, ratio: float) -> None:
        self.adapter = adapter
        self._entries = [_entry(adapter, number, chunk_tokens) for number in range(tokens // chunk_tokens)]
        self.bytes = sum(chunk.nbytes for chunk in self.chunks())
        held = sum(len(ids) for ids, _ in self._entries)
        generator = torch.Generator().manual_seed(0)
        selected = torch.randperm(held, generator=generator)[: round(ratio * held)].sort().values
        self._rows = torch.cat([selected, torch.arange(held, held + QUESTION_TOKENS)])
        question = tuple(range(3, 3 + QUESTION_TOKENS))
        self._ids = (*(token for ids, _ in self._entries for token in ids), *question)

    def chunks(self) -> list[StreamingEntry]:
        """Entries of which nothing has come and nothing is verified."""
        contents = [parse_entry(owned_copy(data), "entry").content for _, data in self._entries]
        return [StreamingEntry(content.held) for content in contents]  # type: ignore[union-attr, arg-type]

    def compute(self, chunks: Sequence[StreamingEntry]) -> torch.Tensor:
        """The pass up to the first token's logits (1, vocab), waiting for what has not come."""
        spans, start = [], 0
        for (ids, _), chunk in zip(self._entries, chunks, strict=True):
            spans.append(PlacedSpan(ChunkKV(ids, chunk), start, start))
            start += len(ids)
        kv_cache = self.adapter.new_cache(len(self._ids), spans)
        logits = self.adapter.compute(kv_cache, self._ids, self.adapter.rows(self._rows))
        self.adapter.synchronize()
        return logits


def _entry(adapter: Adapter, number: int, tokens: int) -> tuple[tuple[int, ...], bytes]:
    """Random KV of a chunk, in the stored format."""
    g, generator = adapter.geometry, torch.Generator().manual_seed(number)
    kv = torch.randn(g.layers, 2, g.kv_heads, tokens, g.head_width, generator=generator).to(g.dtype)
    drawn = torch.randint(3, adapter.model.config.vocab_size, (tokens,), generator=generator)
    chunk = ChunkKV(tuple(drawn.tolist()), kv)
    key = EntryKey("bench", adapter.fingerprint.digest, digest_tokens(chunk.token_ids), MADE)
    return chunk.token_ids, b"".join(encode_entry(key, "random", chunk, []).parts)


def deliver(chunks: Sequence[StreamingEntry], link: Link, by_layer: bool) -> None:
    """Let everything arrive: chunk by chunk, or the first layer of all chunks, then the second."""
    layers = chunks[0].shape[0]
    every = range(layers)
    units = (
        [(chunk, [layer]) for layer in every for chunk in chunks]
        if by_layer
        else [(c, list(every)) for c in chunks]
    )
    due = time.perf_counter()
    for chunk, parts in units:
        due += link.takes_s(chunk.nbytes * len(parts) // layers)
        time.sleep(max(0.0, due - time.perf_counter()))
        for layer in parts:
            chunk.arrive(layer)


def answered_s(context: Context, link: Link, by_layer: bool) -> float:
    """From the first fetch to the first token's logits."""
    chunks = context.chunks()
    loading = threading.Thread(target=deliver, args=(chunks, link, by_layer))
    began = time.perf_counter()
    loading.start()
    if not by_layer:
        loading.join()
    context.compute(chunks)
    taken = time.perf_counter() - began
    loading.join()
    return taken


def measure(context: Context, round_trips_s: Sequence[float], rounds: int) -> dict[str, object]:
    """The balance, and both ways at multiples of it."""
    chunks = context.chunks()
    deliver(chunks, Link(float("inf"), 0.0), by_layer=False)
    context.compute(chunks)
    pass_s = Spread.of(timed(lambda: context.compute(chunks)) for _ in range(max(3, rounds)))
    balance = context.bytes / pass_s.median
    points = []
    for round_trip_s in round_trips_s:
        for times in OF_BALANCE:
            link = Link(times * balance, round_trip_s)
            whole, layers = [], []
            for number in range(rounds):
                for by_layer in (False, True) if number % 2 else (True, False):
                    (layers if by_layer else whole).append(answered_s(context, link, by_layer))
            gains = Spread.of(1 - layer / one for layer, one in zip(layers, whole, strict=True))
            points.append(
                {
                    "round_trip_s": round_trip_s,
                    "bandwidth": link.bandwidth,
                    "of_balance": times,
                    "whole_s": numbers(Spread.of(whole)),
                    "layers_s": numbers(Spread.of(layers)),
                    "gain": numbers(gains),
                }
            )
    return {"bytes": context.bytes, "pass_s": numbers(pass_s), "balance": balance, "points": points}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--ratio", type=float, action="append", help="computed anew; default 0 and 0.15")
    parser.add_argument("--round-trip-ms", type=float, action="append", help="default 0 and 5")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    ratios, trips = given.ratio or [0.0, 0.15], given.round_trip_ms or [0.0, 5.0]
    adapter = random_model(given.shape)
    figures = []
    for ratio in ratios:
        context = Context(adapter, given.context_tokens, given.chunk_tokens, ratio)
        figures.append({"ratio": ratio, **measure(context, [trip / 1e3 for trip in trips], given.rounds)})
    keep({**circumstances(command_of(given)), "contexts": figures}, given.output)


if __name__ == "__main__":
    started(main)
