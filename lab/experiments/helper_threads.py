"""Measures a prefill beside threads that have computed before: with helper threads of their own, and without.

    .venv/bin/python lab/experiments/helper_threads.py --model MODEL --output lab/results/helper_threads.json

The prefill runs in pieces in a thread of its own, as a server's passes do. Beside it are threads that have run one parallel
operation and now wait, as those of requests do. Nothing else runs: what differs is whether they keep helper threads. Both cases
take turns; `ratio` is the median of their times' ratios.
"""

import argparse
import os
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave.machine import use_one_thread
from kvweave.models.adapter import Adapter
from kvweave.models.loading import load_any_model
from kvweave_lab.bench.measurement import elapsed_s

NUMBERS = 4_000_000
"""In the vector that each waiting thread has doubled: enough for a parallel operation."""


def main() -> None:
    """Measure the prefill beside threads with helpers and without, in turn."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", help="by default the shipped reference model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--piece", type=int, default=128)
    parser.add_argument("--others", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    times: list[tuple[float, float]] = []

    def work() -> None:
        # Loaded here: the main thread must have no helpers either.
        adapter = load_any_model(options.model, dtype="float32")
        for number in range(1 + options.rounds):
            both = [measured(adapter, options, helpers) for helpers in (True, False)]
            if number:  # the first round warms up
                times.append((both[0], both[1]))

    _started(work).join()
    found = {
        "helpers_s": statistics.median(one for one, _ in times),
        "no_helpers_s": statistics.median(other for _, other in times),
        "ratio": statistics.median(one / other for one, other in times),
    }
    options.model = options.model and Path(options.model).name
    write_result({**environment(command_of(options)), **rounded(found)}, options.output)


def measured(adapter: Adapter, options: argparse.Namespace, helpers: bool) -> float:
    """Return the seconds of one prefill."""
    ids = torch.randint(3, 200, (options.tokens,)).tolist()
    cache = adapter.new_cache(options.tokens)

    def prefill() -> None:
        for rows in torch.arange(options.tokens).split(options.piece):
            adapter.compute(cache, ids, adapter.rows(rows))

    with _waiting(options.others, helpers):
        return elapsed_s(prefill)


@contextmanager
def _waiting(count: int, helpers: bool) -> Iterator[None]:
    """Have so many threads that have computed and wait."""
    done, ready = threading.Event(), threading.Barrier(count + 1)

    def wait() -> None:
        if not helpers:
            use_one_thread()
        torch.ones(NUMBERS).mul_(2)
        ready.wait()
        done.wait()

    before = len(os.listdir("/proc/self/task"))
    threads = [_started(wait) for _ in range(count)]
    ready.wait()
    assert (len(os.listdir("/proc/self/task")) > before + count) == (helpers and torch.get_num_threads() > 1)
    yield
    done.set()
    for thread in threads:
        thread.join()


def _started(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


if __name__ == "__main__":
    run_script(main)
