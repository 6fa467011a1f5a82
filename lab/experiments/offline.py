"""What preparing a chunk costs before any question comes, by preparation and by what recipes record beside it.

    .venv/bin/python lab/experiments/offline.py --output lab/results/offline.json

In every round each preparation gets the same chunks and an empty store, one after the other: seconds are those of
everything `kvweave.prepare` does, embedding and writing included. Beside it stands what computing a chunk of its own takes at the
least: one pass over its tokens behind nothing, and nothing stored.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

from kvweave.errors import KvweaveError
from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.adapter import Adapter
from kvweave.models.shapes import random_model
from kvweave.recipes.chunks_api import prepare
from kvweave_lab.bench.prompts import chunk_text
from kvweave_lab.bench.spread import Spread, ratios, timed
from measured import arguments, circumstances, command_of, computed_with, keep, numbers, started

RECIPES = {
    "bare": "direct",
    "isolated": "reuse",
    "isolated, 8 bits": "int8+reuse",
    "isolated, 4 bits": "int4+reuse",
    "similar": "similar+reuse",
    "following": "following+reuse",
    "woven": "woven+reuse",
    "weave: following, and movement behind similar chunks": "weave",
    "qcfuse: isolated, and a digest": "qcfuse",
    "cacheclip: isolated in two models": "cacheclip",
    "observed: isolated, and three rehearsals": "cachecraft",
}
"""Recipes that prepare so."""


def measure(adapter: Adapter, shape: str, chunks: int, chunk_tokens: int, rounds: int) -> dict[str, Any]:
    """Everything that is kept but the circumstances."""
    times: dict[str, list[float]] = {name: [] for name in RECIPES}
    least: list[float] = []
    size: dict[str, float] = {}
    refused: dict[str, str] = {}
    for number in range(rounds + 1):  # the first round warms up
        first = number * chunks
        texts = [chunk_text(adapter, first + n, chunk_tokens) for n in range(chunks)]
        ids = [adapter.template.chunk_ids(text) for text in texts]
        least.append(timed(lambda ids=ids: [adapter.encode(one) for one in ids]) / chunks)
        for name in list(RECIPES) if number % 2 else list(RECIPES)[::-1]:
            try:
                seconds, size[name] = prepared(adapter, texts, RECIPES[name])
                times[name].append(seconds)
            except KvweaveError as error:
                refused[name] = str(error)
    return {
        "shape": shape,
        **computed_with(adapter),
        "chunks": chunks,
        "chunk_tokens": chunk_tokens,
        "rounds": rounds,
        "least_s_per_chunk": numbers(Spread.of(least[1:])),
        "rows": [
            {
                "preparation": name,
                "recipe": RECIPES[name],
                "s_per_chunk": numbers(Spread.of(seconds[1:])),
                "of_least": numbers(ratios(seconds[1:], least[1:])),
                "bytes_per_token": size[name],
            }
            for name, seconds in times.items()
            if name not in refused
        ],
        "left_out": refused,
    }


def prepared(adapter: Adapter, texts: Sequence[str], recipe: str) -> tuple[float, float]:
    """Seconds per chunk, and bytes on disk per token of all chunks, the system prefix's among them."""
    with tempfile.TemporaryDirectory() as folder, ChunkStore(folder, limit_bytes=2**62) as store:
        seconds = timed(lambda: prepare(adapter, store, texts, recipe=recipe))
        tokens = sum(len(adapter.template.chunk_ids(text)) for text in texts)
        return seconds / len(texts), store.used_bytes / tokens


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--chunks", type=int, default=12, help="of each round; similar ones are among them")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    adapter = random_model(args.shape)
    result = measure(adapter, args.shape, args.chunks, args.chunk_tokens, args.rounds)
    result |= circumstances(command_of(args))
    keep(result, args.output)


if __name__ == "__main__":
    started(main)
