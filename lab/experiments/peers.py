"""What others' ways of not computing everything again come to, on the same prompt, interleaved in one process.

    .venv/bin/python lab/experiments/peers.py --output lab/results/peers.json

A prefix cache saves what a prompt shares with an earlier one from the first token on. How much that is depends on the
questions: they are drawn as `kvweave bench reuse` draws them, a cache of unlimited size sees them all, and each way's time
is the mean over them, each question at the time measured for as many chunks as it finds. Chunk reordering puts a question's
chunks in the order of the longest path that is stored. Transformers' prefix cache is a `DynamicCache` that holds the prefix already,
copied before the clock starts; kvweave's is the recipe `prefix`, loading and placing timed. kvweave's other recipes find every chunk,
wherever it stands. One of them with a mask instead of the operator stands beside them, and llama.cpp where it is installed
(`llama_cpp_peer.py`), its models in memory from the first round on.
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

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.shapes import random_model
from kvweave.recipes.chunks_api import prepare
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import remember, run
from kvweave.types import Prompt, TokenizedPrompt
from kvweave_lab.bench.baseline import library_attention, stock_prefill
from kvweave_lab.bench.masked_attention import Masked
from kvweave_lab.bench.prompts import chunk_text, prompt_of_chunks
from kvweave_lab.bench.queries import Query, Traffic, draw_queries
from kvweave_lab.bench.reuse import in_best_order
from kvweave_lab.bench.spread import Spread, timed
from llama_cpp_peer import FORMATS, LlamaCpp, opened, why_not
from measured import arguments, circumstances, command_of, computed_with, keep, numbers, started

TRANSFORMERS, OURS = "transformers", "kvweave"
POINTS = 9
"""At so many numbers of chunks found a prefix cache is timed at most; in between it is interpolated."""


def prefix_hits(queries: Sequence[Query], *, ordered: bool) -> list[int]:
    """How many chunks of each question stand in a path that an earlier question has left."""
    paths: set[Query] = set()
    asked: Counter[int] = Counter()
    hits = []
    for drawn in queries:
        query = in_best_order(drawn, paths, asked) if ordered else drawn
        own = [query[: place + 1] for place in range(len(query))]
        hits.append(sum(path in paths for path in own))  # a path's beginnings are paths
        paths.update(own)
        asked.update(query)
    return hits


def points(chunks: int) -> list[int]:
    """Numbers of chunks found that are timed: none, all, and some in between."""
    steps = min(chunks, POINTS - 1)
    return sorted({round(step * chunks / steps) for step in range(steps + 1)})


def mean_over(times: Mapping[int, float], hits: Sequence[int]) -> float:
    """The mean over questions of the time at as many chunks as each finds; between two that were timed, on the line."""
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
    """Transformers' way: what is computed of a prompt goes on from KV of its beginning."""

    def __init__(self, adapter: Adapter, ids: torch.Tensor) -> None:
        self._adapter, self._ids = adapter, ids
        self._whole = DynamicCache(config=adapter.model.config)
        with torch.no_grad():
            adapter.model(ids, past_key_values=self._whole, use_cache=True, logits_to_keep=1)

    def behind(self, tokens: int) -> Step:
        """A step that computes everything behind the first tokens; the cache is copied by now."""
        cache = copy.deepcopy(self._whole)
        cache.crop(tokens - self._ids.shape[1])

        def step() -> None:
            rest = self._ids[:, tokens:]
            with torch.no_grad():
                self._adapter.model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._adapter.synchronize()

        return step


class OurPrefixCache:
    """kvweave's way: the path of a question's chunks in a store, and questions that leave it after some of them."""

    def __init__(self, adapter: Adapter, store: ChunkStore, asked: Prompt, chunk_tokens: int) -> None:
        self._adapter, self._store, self._asked = adapter, store, asked
        self._others = tuple(
            chunk_text(adapter, len(asked.chunks) + number, chunk_tokens)
            for number in range(len(asked.chunks))
        )
        self._recipe = recipe_named("prefix")
        remember(run(self._recipe, adapter, store, adapter.template.render(asked)))

    def behind(self, found: int) -> Step:
        """A step that finds so many chunks and computes the rest; what it computes is not kept."""
        chunks = self._asked.chunks[:found] + self._others[found:]
        prompt = self._adapter.template.render(replace(self._asked, chunks=chunks))
        return lambda: run(self._recipe, self._adapter, self._store, prompt)


def starts(prompt: TokenizedPrompt) -> list[int]:
    """Where the rest of the prompt begins behind no chunk, one chunk, …, all of them."""
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
    """Everything that is kept but the circumstances."""
    asked = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    prompt = adapter.template.render(asked)
    traffic = Traffic(queries=queries, chunks_per_query=len(asked.chunks))
    drawn = draw_queries(traffic)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = stack.enter_context(ChunkStore(Path(folder) / "store", limit_bytes=2**62))
        prepare(adapter, store, asked.chunks)
        paths = stack.enter_context(ChunkStore(Path(folder) / "paths", limit_bytes=2**62))
        cache = OurPrefixCache(adapter, paths, asked, chunk_tokens)
        reason = why_not(adapter)
        llamas = {
            weights: stack.enter_context(opened(adapter, Path(folder), weights, prompt.tokens + 1))
            for weights in (FORMATS if reason is None else ())
        }
        times = timings(adapter, store, prompt, ratio, rounds, cache, llamas)
    medians = {name: Spread.of(own).median for name, own in times.items()}
    plain, best = (prefix_hits(drawn, ordered=ordered) for ordered in (False, True))
    return {
        "shape": shape,
        **computed_with(adapter),
        "context_tokens": context_tokens,
        "chunk_tokens": chunk_tokens,
        "ratio": ratio,
        "rounds": rounds,
        "queries": queries,
        "chunks_found": {"prefix": sum(plain) / queries, "ordered": sum(best) / queries},
        "rows": rows(medians, plain, best, ratio),
        "times": {name: numbers(Spread.of(own)) for name, own in times.items()},
        "left_out": {} if reason is None else {"llama.cpp": reason},
    }


def timings(
    adapter: Adapter,
    store: ChunkStore,
    prompt: TokenizedPrompt,
    ratio: float,
    rounds: int,
    cache: OurPrefixCache,
    llamas: Mapping[str, LlamaCpp],
) -> dict[str, list[float]]:
    """Each way's seconds, round by round; every other round runs backwards."""
    steps = {
        **our_steps(adapter, store, prompt, ratio, cache),
        **transformers_steps(adapter, prompt),
        **llama_steps(llamas, prompt),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):  # the first round warms up
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            step = steps[name]()
            with library_attention(adapter) if name.startswith(TRANSFORMERS) else nullcontext():
                times[name].append(timed(step))
    return {name: own[1:] for name, own in times.items()}


def behind_each(
    name: str, prompt: TokenizedPrompt, behind: Callable[[int], Step]
) -> dict[str, Callable[[], Step]]:
    """What makes the next step of a prefix cache behind each number of chunks found that is timed."""
    return {f"{name} behind {found}": partial(behind, found) for found in points(len(starts(prompt)) - 1)}


def our_steps(
    adapter: Adapter, store: ChunkStore, prompt: TokenizedPrompt, ratio: float, cache: OurPrefixCache
) -> dict[str, Callable[[], Step]]:
    """What makes the next step of each of kvweave's ways."""
    full, reuse, whole = (recipe_named(name) for name in ("full", "reuse", "prophetkv"))
    masked = replace(whole, attend=Masked())
    return {
        OURS: lambda: lambda: run(full, adapter, store, prompt),
        "reuse": lambda: lambda: run(reuse, adapter, store, prompt),
        "prophetkv": lambda: lambda: run(whole, adapter, store, prompt, ratio=ratio),
        "prophetkv with a mask": lambda: lambda: run(masked, adapter, store, prompt, ratio=ratio),
        **behind_each(OURS, prompt, cache.behind),
    }


def transformers_steps(adapter: Adapter, prompt: TokenizedPrompt) -> dict[str, Callable[[], Step]]:
    """The same of transformers' own, on the same model."""
    ids = torch.tensor([prompt.token_ids], device=adapter.geometry.device)
    with library_attention(adapter):
        cache = PrefixCache(adapter, ids)
    begin = starts(prompt)
    return {
        TRANSFORMERS: lambda: lambda: stock_prefill(adapter, ids),
        **behind_each(TRANSFORMERS, prompt, lambda found: cache.behind(begin[found])),
    }


def llama_steps(llamas: Mapping[str, LlamaCpp], prompt: TokenizedPrompt) -> dict[str, Callable[[], Step]]:
    """The same of llama.cpp's: each step leaves the whole prompt behind, of which the next one keeps its beginning."""
    begin, steps = starts(prompt), {}
    for weights, llama in llamas.items():
        llama.prefill(prompt.token_ids)
        named = {f"llama.cpp {weights}": 0}
        named |= {f"llama.cpp {weights} behind {found}": begin[found] for found in points(len(begin) - 1)}
        for name, kept in named.items():
            steps[name] = lambda llama=llama, kept=kept: lambda: llama.prefill(prompt.token_ids, kept)
    return steps


def rows(
    medians: Mapping[str, float], plain: Sequence[int], best: Sequence[int], ratio: float
) -> list[dict[str, Any]]:
    """Each way's mean over the questions, beside the fastest full prefill of transformers and ours.

    A prefix cache that takes longer than computing everything is taken to compute everything.
    """
    full_s = min(medians[TRANSFORMERS], medians[OURS])
    found = {}
    for name in [name for name in medians if name.endswith(" behind 0")]:
        peer = name.removesuffix(" behind 0")
        behind = {
            int(each.rpartition(" ")[2]): min(seconds, medians[peer])
            for each, seconds in medians.items()
            if each.startswith(f"{peer} behind ")
        }
        found[f"{peer}, full prefill"] = medians[peer]
        found[f"{peer}, prefix cache"] = mean_over(behind, plain)
        found[f"{peer}, prefix cache, chunks reordered"] = mean_over(behind, best)
    found["kvweave, reuse"] = medians["reuse"]
    found[f"kvweave, prophetkv at {ratio:g}"] = medians["prophetkv"]
    found["the same with a mask"] = medians["prophetkv with a mask"]
    return [{"way": way, "ttft_s": seconds, "speedup": full_s / seconds} for way, seconds in found.items()]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
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
    result |= circumstances(command_of(args))
    keep(result, args.output)


if __name__ == "__main__":
    started(main)
