"""How soon idle work gives way to a user's request, and what running in small blocks costs it.

    .venv/bin/python lab/experiments/giving_way.py --output lab/results/giving_way.json

A thread prefills a long prompt and decodes behind it, over and over, at low priority, while requests arrive at random
moments, as `kvweave ask` in another process announces them. Measured is the time from a request's arrival to the moment
when the work has let go of the model. The cost is that of one prefill at low priority over one at once, interleaved.
"""

import random
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from kvweave.config import GenerationConfig
from kvweave.engine.background import BackgroundStopped, RequestGuard, Requests
from kvweave.engine.generation import Decoded, generate
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache
from kvweave.models.preemption import BLOCK_TOKENS
from kvweave.models.shapes import random_model
from measured import arguments, circumstances, command_of, keep, started

LONGEST_S = 60.0
"""Work that holds the model longer than this does not give way at all."""


class Timed(RequestGuard):
    """Notes when the work let go."""

    def __init__(self, requests: Requests, stop: threading.Event) -> None:
        super().__init__(requests, 0.0, stop)
        self.let_go = threading.Event()
        self.at = 0.0

    def give_way(self) -> None:
        self.at = time.perf_counter()
        self.let_go.set()
        super().give_way()


def prefill(adapter: Adapter, ids: list[int]) -> tuple[FusedCache, torch.Tensor]:
    kv_cache = adapter.new_cache(len(ids))
    return kv_cache, adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))


def work(adapter: Adapter, ids: list[int], new_tokens: int, way: Timed) -> None:
    with suppress(BackgroundStopped), adapter.low_priority(way):
        while True:
            kv_cache, logits = prefill(adapter, ids)
            for _ in generate(adapter, kv_cache, ids, logits, GenerationConfig(), new_tokens, Decoded()):
                pass


def latencies(adapter: Adapter, ids: list[int], new_tokens: int, requests: int, seed: int) -> list[float]:
    rng, stop, found = random.Random(seed), threading.Event(), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.lock"
        Requests(path).arrive().leave()
        way = Timed(Requests(path), stop)
        working = threading.Thread(target=work, args=(adapter, ids, new_tokens, way))
        working.start()
        try:
            for _ in range(requests):
                time.sleep(rng.uniform(0.2, 1.5))
                way.let_go.clear()
                began = time.perf_counter()
                arrival = Requests(path).arrive()
                if not way.let_go.wait(LONGEST_S):
                    raise SystemExit(f"the work did not let go of the model within {LONGEST_S:.0f} s")
                found.append(way.at - began)
                arrival.leave()
        finally:
            stop.set()
            working.join()
    return found


def cost(adapter: Adapter, ids: list[int], repeats: int) -> list[float]:
    """Seconds in blocks over seconds at once, for each of some interleaved pairs."""
    shares = []
    with tempfile.TemporaryDirectory() as folder:
        way = Timed(Requests(Path(folder) / "requests.lock"), threading.Event())
        for _ in range(repeats):
            began = time.perf_counter()
            prefill(adapter, ids)
            middle = time.perf_counter()
            with adapter.low_priority(way):
                prefill(adapter, ids)
            shares.append((time.perf_counter() - middle) / (middle - began))
    return shares


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    adapter = random_model(given.shape)
    rng = random.Random(0)
    ids = [rng.randrange(100, 4000) for _ in range(given.tokens)]
    found = sorted(latencies(adapter, ids, given.new_tokens, given.requests, seed=1))
    shares = cost(adapter, ids, given.repeats)
    result = {
        "shape": given.shape,
        "prompt_tokens": given.tokens,
        "block_tokens": BLOCK_TOKENS,
        "requests": given.requests,
        "median_s": statistics.median(found),
        "p95_s": found[int(0.95 * (len(found) - 1))],
        "longest_s": found[-1],
        "blocks_over_at_once": statistics.median(shares),
        "blocks_over_at_once_range": [min(shares), max(shares)],
    }
    keep(result | circumstances(command_of(given)), given.output)


if __name__ == "__main__":
    started(main)
