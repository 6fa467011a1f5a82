"""Measures how soon background work frees the model for a request, and the cost of computing in small blocks.

    .venv/bin/python lab/experiments/preemption_delay.py --output lab/results/preemption_delay.json

A thread repeatedly prefills a long prompt and decodes after it, at low priority. Requests arrive at random moments,
announced as by `kvweave ask` in another process. The delay is the time from a request's arrival until the model is free.
The cost is the time of a prefill at low priority, relative to one at normal priority; both alternate.
"""

import random
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from experiment import argument_parser, command_of, environment, run_script, write_result
from kvweave.answering.generation import Decoded, generate
from kvweave.config import GenerationConfig
from kvweave.models.adapter import Adapter
from kvweave.models.fused_cache import FusedCache
from kvweave.models.preemption import BLOCK_TOKENS
from kvweave.state.active_requests import ActiveRequests, BackgroundStopped, RequestGuard
from kvweave_lab.shapes import random_model

TIMEOUT_S = 60.0
"""Work that occupies the model for longer counts as never paused."""


class TimedGuard(RequestGuard):
    """Records when the work pauses."""

    def __init__(self, requests: ActiveRequests, stop: threading.Event) -> None:
        super().__init__(requests, 0.0, stop)
        self.paused = threading.Event()
        self.paused_at = 0.0

    def wait_for_requests(self) -> None:
        self.paused_at = time.perf_counter()
        self.paused.set()
        super().wait_for_requests()


def prefill(adapter: Adapter, ids: list[int]) -> tuple[FusedCache, torch.Tensor]:
    kv_cache = adapter.new_cache(len(ids))
    return kv_cache, adapter.compute(kv_cache, ids, adapter.rows(torch.arange(len(ids))))


def work(adapter: Adapter, ids: list[int], new_tokens: int, guard: TimedGuard) -> None:
    with suppress(BackgroundStopped), adapter.low_priority(guard):
        while True:
            kv_cache, logits = prefill(adapter, ids)
            for _ in generate(adapter, kv_cache, ids, logits, GenerationConfig(), new_tokens, Decoded()):
                pass


def delays(adapter: Adapter, ids: list[int], new_tokens: int, requests: int, seed: int) -> list[float]:
    rng, stop, found = random.Random(seed), threading.Event(), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.lock"
        ActiveRequests(path).start().close()
        guard = TimedGuard(ActiveRequests(path), stop)
        worker = threading.Thread(target=work, args=(adapter, ids, new_tokens, guard))
        worker.start()
        try:
            for _ in range(requests):
                time.sleep(rng.uniform(0.2, 1.5))
                guard.paused.clear()
                start = time.perf_counter()
                arrival = ActiveRequests(path).start()
                if not guard.paused.wait(TIMEOUT_S):
                    raise SystemExit(f"the work did not free the model within {TIMEOUT_S:.0f} s")
                found.append(guard.paused_at - start)
                arrival.close()
        finally:
            stop.set()
            worker.join()
    return found


def cost(adapter: Adapter, ids: list[int], repeats: int) -> list[float]:
    """Return the seconds at low priority over those at normal priority, for each interleaved pair."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        guard = TimedGuard(ActiveRequests(Path(folder) / "requests.lock"), threading.Event())
        for _ in range(repeats):
            start = time.perf_counter()
            prefill(adapter, ids)
            middle = time.perf_counter()
            with adapter.low_priority(guard):
                prefill(adapter, ids)
            ratios.append((time.perf_counter() - middle) / (middle - start))
    return ratios


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    adapter = random_model(args.shape)
    rng = random.Random(0)
    ids = [rng.randrange(100, 4000) for _ in range(args.tokens)]
    found = sorted(delays(adapter, ids, args.new_tokens, args.requests, seed=1))
    ratios = cost(adapter, ids, args.repeats)
    result = {
        "shape": args.shape,
        "prompt_tokens": args.tokens,
        "block_tokens": BLOCK_TOKENS,
        "requests": args.requests,
        "median_s": statistics.median(found),
        "p95_s": found[int(0.95 * (len(found) - 1))],
        "longest_s": found[-1],
        "blocks_over_at_once": statistics.median(ratios),
        "blocks_over_at_once_range": [min(ratios), max(ratios)],
    }
    write_result(result | environment(command_of(args)), args.output)


if __name__ == "__main__":
    run_script(main)
