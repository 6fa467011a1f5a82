"""TTFT of warm reuse against full prefill, interleaved in one process, on a real shape with random weights.

    .venv/bin/python benchmarks/ttft.py --context-tokens 4096 --output benchmarks/results/ttft.json

Our path runs from "chunks are known" to the first token's logits: look-up, load (verified in this process before,
hence warm), placement and the question's pass. The baseline is the better of transformers' own causal prefill
(sdpa, `logits_to_keep=1`) and ours without reuse, over the same ids. `kvweave bench ttft` measures more; this is
the README's figure.
"""

import statistics
import tempfile
import time

import torch
from measured import arguments, circumstances, command_of, computed_with, keep

import kvweave
from kvweave.bench.baseline import library_attention, stock_prefill
from kvweave.bench.prompts import prompt_of_chunks
from kvweave.models.shapes import random_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run


def measure(shape: str, context_tokens: int, chunk_tokens: int, repeats: int) -> dict[str, object]:
    adapter = random_model(shape)
    asked = prompt_of_chunks(adapter, context_tokens, chunk_tokens)
    prompt, chunks = adapter.template.render(asked), asked.chunks
    ids = torch.tensor([prompt.token_ids])
    full, reuse = recipe_named("full"), recipe_named("reuse")
    times: dict[str, list[float]] = {"stock": [], "full": [], "reuse": []}
    with tempfile.TemporaryDirectory() as folder, kvweave.ChunkStore(folder) as store:
        began = time.perf_counter()
        kvweave.prepare(adapter, store, chunks)
        prepare_s = (time.perf_counter() - began) / len(chunks)
        for repeat in range(repeats + 1):
            with library_attention(adapter):
                began = time.perf_counter()
                stock = stock_prefill(adapter, ids)
                stock_s = time.perf_counter() - began
            plain = run(full, adapter, store, prompt)
            warm = run(reuse, adapter, store, prompt)
            everything = run(reuse, adapter, store, prompt, ratio=1.0) if repeat == 0 else None
            if everything is not None:
                difference = float((everything.logits.float() - stock.float()).abs().max())
                continue  # the first round warms up
            times["stock"].append(stock_s)
            times["full"].append(plain.timing.ttft_s)
            times["reuse"].append(warm.timing.ttft_s)
        stats = store.stats()
    best = min("stock", "full", key=lambda name: statistics.median(times[name]))
    ratios = [warm_s / full_s for warm_s, full_s in zip(times["reuse"], times[best], strict=True)]
    return {
        "shape": shape,
        **computed_with(adapter),
        "prompt_tokens": prompt.tokens,
        "repeats": repeats,
        "baseline": best,
        "full_s": statistics.median(times[best]),
        "full_range_s": [min(times[best]), max(times[best])],
        "reuse_s": statistics.median(times["reuse"]),
        "reuse_range_s": [min(times["reuse"]), max(times["reuse"])],
        "reuse_over_full": statistics.median(ratios),
        "reuse_over_full_range": [min(ratios), max(ratios)],
        "reuse_timing": {name: getattr(warm.timing, name) for name in ("match_s", "place_s", "recompute_s")},
        "largest_logit_difference_at_ratio_1": difference,
        "prepare_s_per_chunk": prepare_s,
        "bytes_per_token_on_disk": stats.bytes / stats.tokens,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    row = measure(args.shape, args.context_tokens, args.chunk_tokens, args.repeats)
    keep(row | circumstances(command_of(args)), args.output)


if __name__ == "__main__":
    main()
