"""TTFT of warm reuse against full prefill, interleaved in one process, on a real shape with random weights.

    .venv/bin/python benchmarks/ttft.py --context-tokens 4096 --output benchmarks/results/ttft.json

Our path runs from "chunks are known" to the first token's logits: look-up, load (verified in this process before,
hence warm), placement and the question's pass. The baseline is the better of transformers' own causal prefill
(sdpa, `logits_to_keep=1`) and ours without reuse, over the same ids.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measured import circumstances
from transformers.cache_utils import DynamicCache

import kvweave
from kvweave.models.adapter import Adapter
from kvweave.models.shapes import random_model
from kvweave.recipes.methods import recipe_named
from kvweave.recipes.recipe import run

WORDS = "The room number of Paris is 706. The sky was sunny that morning. Aaron lives in Berlin. ".split()


def chunk_text(number: int, tokens: int, tokenizer: object) -> str:
    generator = torch.Generator().manual_seed(number)
    picks = torch.randint(len(WORDS), (tokens,), generator=generator).tolist()
    text = " ".join(WORDS[i].strip(".") for i in picks)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]  # type: ignore[operator]
    return tokenizer.decode(ids)  # type: ignore[attr-defined,no-any-return]


def stock_prefill(adapter: Adapter, ids: torch.Tensor) -> torch.Tensor:
    """What a transformers user runs today."""
    with torch.no_grad():
        return adapter.model(ids, past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1).logits[
            :, -1
        ]


def measure(shape: str, context_tokens: int, chunk_tokens: int, repeats: int) -> dict[str, object]:
    adapter = random_model(shape)
    chunks = [chunk_text(i, chunk_tokens, adapter.tokenizer) for i in range(context_tokens // chunk_tokens)]
    prompt = adapter.template.render(kvweave.Prompt("What is the room number of Paris?", tuple(chunks)))
    ids = torch.tensor([prompt.token_ids])
    full, reuse = recipe_named("full"), recipe_named("reuse")
    times: dict[str, list[float]] = {"stock": [], "full": [], "reuse": []}
    with tempfile.TemporaryDirectory() as folder, kvweave.ChunkStore(folder) as store:
        began = time.perf_counter()
        kvweave.prepare(adapter, store, chunks)
        prepare_s = (time.perf_counter() - began) / len(chunks)
        for repeat in range(repeats + 1):
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
        "dtype": str(adapter.geometry.dtype).removeprefix("torch."),
        "device": str(adapter.geometry.device),
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    row = measure(args.shape, args.context_tokens, args.chunk_tokens, args.repeats)
    row |= circumstances(
        f"benchmarks/ttft.py --shape {args.shape} --context-tokens {args.context_tokens} "
        f"--chunk-tokens {args.chunk_tokens} --repeats {args.repeats}"
    )
    text = json.dumps(row, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
