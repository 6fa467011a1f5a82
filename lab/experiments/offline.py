"""Measures the cost of preparing a chunk, by preparation and by the features that recipes extract.

    .venv/bin/python lab/experiments/offline.py --output lab/results/offline.json

In every round, each preparation gets the same chunks and an empty store. The seconds include all of `kvweave.prepare`, with
embedding and writing. The baseline is the least that a chunk can take: one pass over its tokens alone, without storing.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

from experiment import (
    argument_parser,
    command_of,
    dtype_and_device,
    environment,
    median_and_range,
    run_script,
    write_result,
)
from kvweave.errors import KvweaveError
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.recipes.offline import prepare
from kvweave_lab.bench.measurement import MedianRange, elapsed_s, paired_ratios
from kvweave_lab.bench.workload import chunk_text
from kvweave_lab.shapes import random_model

RECIPES = {
    "bare": "direct",
    "isolated": "reuse",
    "isolated, 8 bits": "int8+reuse",
    "isolated, 4 bits": "int4+reuse",
    "similar": "similar+reuse",
    "following": "following+reuse",
    "woven": "woven+reuse",
    "following, and movement in a pass of its own": "following+weave",
    "qcfuse: isolated, and a digest": "qcfuse",
    "cacheclip: isolated in two models": "cacheclip",
    "observed: isolated, and three rehearsals": "cachecraft",
}
"""A recipe for each preparation."""


def measure(adapter: Adapter, shape: str, chunks: int, chunk_tokens: int, rounds: int) -> dict[str, Any]:
    """Return the result without the environment."""
    times: dict[str, list[float]] = {name: [] for name in RECIPES}
    least: list[float] = []
    size: dict[str, float] = {}
    refused: dict[str, str] = {}
    for number in range(rounds + 1):  # the first round warms up
        first = number * chunks
        texts = [chunk_text(adapter, first + n, chunk_tokens) for n in range(chunks)]
        ids = [adapter.template.chunk_ids(text) for text in texts]
        least.append(elapsed_s(lambda ids=ids: [adapter.encode(one) for one in ids]) / chunks)
        for name in list(RECIPES) if number % 2 else list(RECIPES)[::-1]:
            try:
                seconds, size[name] = prepare_once(adapter, texts, RECIPES[name])
                times[name].append(seconds)
            except KvweaveError as error:
                refused[name] = str(error)
    return {
        "shape": shape,
        **dtype_and_device(adapter),
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "rounds": rounds,
        "least_s_per_chunk": median_and_range(MedianRange.of(least[1:])),
        "rows": [
            {
                "preparation": name,
                "recipe": RECIPES[name],
                "s_per_chunk": median_and_range(MedianRange.of(seconds[1:])),
                "of_least": median_and_range(paired_ratios(seconds[1:], least[1:])),
                "bytes_per_token": size[name],
            }
            for name, seconds in times.items()
            if name not in refused
        ],
        "left_out": refused,
    }


def prepare_once(adapter: Adapter, texts: Sequence[str], recipe: str) -> tuple[float, float]:
    """Return the seconds per chunk, and the bytes on disk per token of all chunks, including the system prefix's."""
    with tempfile.TemporaryDirectory() as folder, ChunkStore(folder, limit_bytes=2**62) as store:
        seconds = elapsed_s(lambda: prepare(adapter, store, texts, recipe=recipe))
        tokens = sum(len(adapter.template.chunk_ids(text)) for text in texts)
        return seconds / len(texts), store.used_bytes / tokens


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--chunks", type=int, default=12, help="chunks per round")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    adapter = random_model(args.shape)
    result = measure(adapter, args.shape, args.chunks, args.chunk_tokens, args.rounds)
    result |= environment(command_of(args))
    write_result(result, args.output)


if __name__ == "__main__":
    run_script(main)
