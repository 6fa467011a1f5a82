"""Compares kvweave with prefix caches of other programs, on the same prompt, interleaved in one process.

    .venv/bin/python lab/experiments/peers.py --output lab/results/peers.json

A prefix cache saves computing the tokens that a prompt's beginning shares with an earlier prompt. The savings depend on
the questions, which are drawn as in `kvweave bench reuse`; the cache has no size limit. The time of a prefix cache is a
mean over questions: each takes the time measured for the number of chunks that it finds. Chunk reordering puts a
question's chunks in the order of the longest stored path. Transformers' prefix cache is a `DynamicCache` with the
prefix, copied before the timed part. kvweave's is the recipe `prefix`, including loading and placing. Its other recipes
find every chunk at any position; one also runs with a mask instead of the operator. llama.cpp runs if it is installed
(`llama_cpp_peer.py`), with its models in memory from the first round on.
"""

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from experiment import (
    command_of,
    dtype_and_device,
    environment,
    median_and_range,
    run_script,
    shape_parser,
    write_result,
)
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.offline import prepare
from kvweave.recipes.recipe import remember, run
from kvweave.types import Prompt, TokenizedPrompt
from kvweave_lab.bench.baselines import MaskAttend, stock_attention, transformers_prefill
from kvweave_lab.bench.measurement import MedianRange, elapsed_s
from kvweave_lab.bench.reuse import reorder_for_prefix
from kvweave_lab.bench.workload import Query, Traffic, chunk_text, draw_queries, prompt_of_chunks
from kvweave_lab.shapes import random_model
from llama_cpp_peer import FORMATS, LlamaCpp, open_llama_cpp, unsupported_reason

TRANSFORMERS, OURS = "transformers", "kvweave"
MAX_POINTS = 9
"""A prefix cache is timed for at most this many numbers of found chunks; others are interpolated."""


def prefix_hits(queries: Sequence[Query], *, ordered: bool) -> list[int]:
    """Return for each question the number of chunks in the longest path that an earlier question stored."""
    paths: set[Query] = set()
    counts: Counter[int] = Counter()
    hits = []
    for drawn in queries:
        query = reorder_for_prefix(drawn, paths, counts) if ordered else drawn
        own = [query[: place + 1] for place in range(len(query))]
        hits.append(sum(path in paths for path in own))  # every beginning of a path is a path
        paths.update(own)
        counts.update(query)
    return hits


def points(chunks: int) -> list[int]:
    """Return the numbers of found chunks to time: none, all, and some in between."""
    steps = min(chunks, MAX_POINTS - 1)
    return sorted({round(step * chunks / steps) for step in range(steps + 1)})


def mean_over(times: Mapping[int, float], hits: Sequence[int]) -> float:
    """Return the mean time over questions by number of found chunks, linearly interpolated."""
    known = sorted(times)

    def at(found: int) -> float:
        above = next(one for one in known if one >= found)
        if above == found:
            return times[found]
        below = max(one for one in known if one < found)
        return times[below] + (times[above] - times[below]) * (found - below) / (above - below)

    return sum(map(at, hits)) / len(hits)


Step = Callable[[], object]


class PrefixCache:
    """Transformers' prefix cache: a pass continues from KV of the prompt's beginning."""

    def __init__(self, adapter: Adapter, ids: torch.Tensor) -> None:
        self._adapter, self._ids = adapter, ids
        self._full_cache = DynamicCache(config=adapter.model.config)
        with torch.no_grad():
            adapter.model(ids, past_key_values=self._full_cache, use_cache=True, logits_to_keep=1)

    def after(self, tokens: int) -> Step:
        """Return a step that computes everything after the first tokens; copies the cache first."""
        cache = copy.deepcopy(self._full_cache)
        cache.crop(tokens - self._ids.shape[1])

        def step() -> None:
            rest = self._ids[:, tokens:]
            with torch.no_grad():
                self._adapter.model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._adapter.synchronize()

        return step


class KvweavePrefixCache:
    """kvweave's prefix cache: a stored path of chunks, and questions that share its beginning."""

    def __init__(self, adapter: Adapter, store: ChunkStore, question: Prompt, chunk_tokens: int) -> None:
        self._adapter, self._store, self._question = adapter, store, question
        self._others = tuple(
            chunk_text(adapter, len(question.chunks) + number, chunk_tokens)
            for number in range(len(question.chunks))
        )
        self._recipe = recipe_named("prefix")
        remember(run(self._recipe, adapter, store, adapter.template.render(question)))

    def after(self, found: int) -> Step:
        """Return a step that finds this many chunks and computes the rest, without storing it."""
        chunks = self._question.chunks[:found] + self._others[found:]
        prompt = self._adapter.template.render(replace(self._question, chunks=chunks))
        return lambda: run(self._recipe, self._adapter, self._store, prompt)


def starts(prompt: TokenizedPrompt) -> list[int]:
    """Return the position after no chunk, after one chunk, and so on."""
    chunks = [span for span in prompt.spans if span.kind == "chunk"]
    return [chunks[0].start, *(span.end for span in chunks)]


def measure(
    adapter: Adapter,
    shape: str,
    context_tokens: int,
    chunk_tokens: int,
    ratio: float,
    rounds: int,
    queries: int,
) -> dict[str, Any]:
    """Return the result without the environment."""
    question = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    prompt = adapter.template.render(question)
    traffic = Traffic(queries=queries, chunks_per_query=len(question.chunks))
    drawn = draw_queries(traffic)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = stack.enter_context(ChunkStore(Path(folder) / "store", limit_bytes=2**62))
        prepare(adapter, store, question.chunks)
        paths = stack.enter_context(ChunkStore(Path(folder) / "paths", limit_bytes=2**62))
        cache = KvweavePrefixCache(adapter, paths, question, chunk_tokens)
        reason = unsupported_reason(adapter)
        llamas = {
            weights: stack.enter_context(open_llama_cpp(adapter, Path(folder), weights, prompt.tokens + 1))
            for weights in (FORMATS if reason is None else ())
        }
        times = timings(adapter, store, prompt, ratio, rounds, cache, llamas)
    medians = {name: MedianRange.of(own).median for name, own in times.items()}
    plain, reordered = (prefix_hits(drawn, ordered=ordered) for ordered in (False, True))
    return {
        "shape": shape,
        **dtype_and_device(adapter),
        "context_tokens": context_tokens,
        "chunk_tokens": chunk_tokens,
        "ratio": ratio,
        "rounds": rounds,
        "queries": queries,
        "chunks_found": {"prefix": sum(plain) / queries, "ordered": sum(reordered) / queries},
        "rows": rows(medians, plain, reordered, ratio),
        "times": {name: median_and_range(MedianRange.of(own)) for name, own in times.items()},
        "left_out": {} if reason is None else {"llama.cpp": reason},
    }


def timings(
    adapter: Adapter,
    store: ChunkStore,
    prompt: TokenizedPrompt,
    ratio: float,
    rounds: int,
    cache: KvweavePrefixCache,
    llamas: Mapping[str, LlamaCpp],
) -> dict[str, list[float]]:
    """Return each way's seconds, round by round; every other round runs in reverse order."""
    steps = {
        **kvweave_steps(adapter, store, prompt, ratio, cache),
        **transformers_steps(adapter, prompt),
        **llama_steps(llamas, prompt),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):  # the first round warms up
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            step = steps[name]()
            with stock_attention(adapter) if name.startswith(TRANSFORMERS) else nullcontext():
                times[name].append(elapsed_s(step))
    return {name: own[1:] for name, own in times.items()}


def prefix_steps(
    name: str, prompt: TokenizedPrompt, after: Callable[[int], Step]
) -> dict[str, Callable[[], Step]]:
    """Return the steps of a prefix cache, for each timed number of found chunks."""
    return {f"{name} behind {found}": partial(after, found) for found in points(len(starts(prompt)) - 1)}


def kvweave_steps(
    adapter: Adapter, store: ChunkStore, prompt: TokenizedPrompt, ratio: float, cache: KvweavePrefixCache
) -> dict[str, Callable[[], Step]]:
    """Return functions that prepare the next step, for each of kvweave's ways."""
    full, reuse, prophetkv = (recipe_named(name) for name in ("full", "reuse", "prophetkv"))
    masked = replace(prophetkv, attend=MaskAttend())
    return {
        OURS: lambda: lambda: run(full, adapter, store, prompt),
        "reuse": lambda: lambda: run(reuse, adapter, store, prompt),
        "prophetkv": lambda: lambda: run(prophetkv, adapter, store, prompt, ratio=ratio),
        "prophetkv with a mask": lambda: lambda: run(masked, adapter, store, prompt, ratio=ratio),
        **prefix_steps(OURS, prompt, cache.after),
    }


def transformers_steps(adapter: Adapter, prompt: TokenizedPrompt) -> dict[str, Callable[[], Step]]:
    """Return the same for transformers, on the same model."""
    ids = torch.tensor([prompt.token_ids], device=adapter.geometry.device)
    with stock_attention(adapter):
        cache = PrefixCache(adapter, ids)
    positions = starts(prompt)
    return {
        TRANSFORMERS: lambda: lambda: transformers_prefill(adapter, ids),
        **prefix_steps(TRANSFORMERS, prompt, lambda found: cache.after(positions[found])),
    }


def llama_steps(llamas: Mapping[str, LlamaCpp], prompt: TokenizedPrompt) -> dict[str, Callable[[], Step]]:
    """Return the same for llama.cpp: each step keeps the beginning of the prompt that the last step computed."""
    positions, steps = starts(prompt), {}
    for weights, llama in llamas.items():
        llama.prefill(prompt.token_ids)
        named = {f"llama.cpp {weights}": 0}
        named |= {
            f"llama.cpp {weights} behind {found}": positions[found] for found in points(len(positions) - 1)
        }
        for name, kept in named.items():
            steps[name] = lambda llama=llama, kept=kept: lambda: llama.prefill(prompt.token_ids, kept)
    return steps


def rows(
    medians: Mapping[str, float], plain: Sequence[int], reordered: Sequence[int], ratio: float
) -> list[dict[str, Any]]:
    """Return each way's mean over the questions, and its speed-up over the faster full prefill.

    A prefix cache that is slower than computing everything counts as computing everything.
    """
    full_s = min(medians[TRANSFORMERS], medians[OURS])
    found = {}
    for name in [name for name in medians if name.endswith(" behind 0")]:
        peer = name.removesuffix(" behind 0")
        times = {
            int(each.rpartition(" ")[2]): min(seconds, medians[peer])
            for each, seconds in medians.items()
            if each.startswith(f"{peer} behind ")
        }
        found[f"{peer}, full prefill"] = medians[peer]
        found[f"{peer}, prefix cache"] = mean_over(times, plain)
        found[f"{peer}, prefix cache, chunks reordered"] = mean_over(times, reordered)
    found["kvweave, reuse"] = medians["reuse"]
    found[f"kvweave, prophetkv at {ratio:g}"] = medians["prophetkv"]
    found["the same with a mask"] = medians["prophetkv with a mask"]
    return [{"way": way, "ttft_s": seconds, "speedup": full_s / seconds} for way, seconds in found.items()]


def main() -> None:
    parser = shape_parser(__doc__, context_tokens=4096)
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--queries", type=int, default=1000)
    args = parser.parse_args()
    result = measure(
        random_model(args.shape),
        args.shape,
        args.context_tokens,
        args.chunk_tokens,
        args.ratio,
        args.rounds,
        args.queries,
    )
    result |= environment(command_of(args))
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
