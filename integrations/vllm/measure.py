"""Time to the first token in vLLM at several shares of recomputed rows, against vLLM without kvweave and with its prefix cache.

    python measure.py MODEL --tokens 2048 4096 --prompts 20 --out ttft.json

Every prompt is run in each way in turn, in one process, so that what slows the machine slows all of them. Ways:

    vllm        vLLM's own prefill of the whole prompt, nothing cached
    prefix      vLLM's prefix cache, after another prompt with the same chunks in another order
    rows R      kvweave with ratio R of the chunks' tokens (recipe epic, which needs no pass to select)
    alone R     a prompt of as many tokens as `rows R` computes, rows and question: what they cost without the other tokens
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

CHUNK_TOKENS, RATIOS = 256, (0.0, 0.1, 0.15, 0.3, 1.0)
QUESTION = "Which of these texts names a year, and which year is it?"


class Bench:
    """One vLLM with kvweave in it."""

    def __init__(self, model: str, dtype: str, store: str, most: int) -> None:
        from vllm import LLM, SamplingParams

        from kvweave_vllm.cli import connector_config

        self._params = SamplingParams
        self.llm = LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=most,
            max_num_batched_tokens=most,
            worker_extension_cls="kvweave_vllm.connector.Extension",
            kv_transfer_config=connector_config(store=store),
        )
        self.tokenizer = self.llm.get_tokenizer()

    def seconds(self, body: dict[str, Any]) -> float:
        """Return the time to the first token."""
        extra = body.get("extra_body", {})
        params = {name: extra[name] for name in ("kv_transfer_params",) if name in extra}
        prompt = {"prompt_token_ids": body["prompt"]}
        if "cache_salt" in extra:
            prompt["cache_salt"] = extra["cache_salt"]
        began = time.perf_counter()
        self.llm.generate(
            [prompt], self._params(max_tokens=1, temperature=0, extra_args=params), use_tqdm=False
        )
        return time.perf_counter() - began

    def forget(self) -> None:
        """Empty vLLM's prefix cache."""
        assert self.llm.reset_prefix_cache()


def natural_chunks(tokenizer: Any, count: int, seed: int) -> list[str]:
    """Return pieces of the natural sample documents, in a random order; the same texts again where they are too few."""
    from kvweave.samples import DOCUMENTS

    texts = [path.read_text() for path in sorted((DOCUMENTS.parent / "natural").iterdir())]
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    random.Random(seed).shuffle(texts)
    start = random.Random(seed).randrange(len(ids))
    size = CHUNK_TOKENS - 2
    rolled = (ids[start:] + ids[:start]) * (1 + count * size // len(ids))
    return [tokenizer.decode(rolled[n * size : (n + 1) * size]) for n in range(count)]


def measure(bench: Bench, tokens: int, prompts: int) -> dict[str, list[float]]:
    """Return the seconds of each way for each prompt."""
    import kvweave_vllm

    found: dict[str, list[float]] = {}
    for number in range(prompts):
        chunks = natural_chunks(bench.tokenizer, tokens // CHUNK_TOKENS, number)
        for body in kvweave_vllm.preparations(bench.tokenizer, chunks, recipe="epic"):
            bench.seconds(body)
        bodies = {
            ratio: kvweave_vllm.request(bench.tokenizer, chunks, QUESTION, recipe="epic", ratio=ratio)
            for ratio in RATIOS
        }
        ids = bodies[0.0]["prompt"]
        spans = bodies[0.0]["extra_body"]["kv_transfer_params"]["kvweave"]["spans"]
        inside = spans[-1][1] - spans[0][0]
        shuffled = kvweave_vllm.request(bench.tokenizer, chunks[::-1], QUESTION, recipe="full")
        ways: list[tuple[str, dict[str, Any]]] = [("vllm", {"prompt": ids}), ("prefix", {"prompt": ids})]
        for ratio in RATIOS:
            ways.append((f"rows {ratio:g}", bodies[ratio]))
            if ratio < 1:
                ways.append(
                    (f"alone {ratio:g}", {"prompt": ids[: len(ids) - inside + round(ratio * inside)]})
                )
        random.Random(number).shuffle(ways)
        for way, body in ways:
            bench.forget()
            if way == "prefix":
                bench.seconds(shuffled)
            found.setdefault(way, []).append(bench.seconds(body))
    return found


def table(found: dict[str, list[float]]) -> str:
    """Return medians, quartiles and the ratio to vLLM's own prefill, prompt by prompt."""
    lines = ["| way | median s | quartiles | vllm / way |", "|---|---|---|---|"]
    for way in sorted(found):
        low, middle, high = (
            statistics.quantiles(found[way], n=4, method="inclusive")
            if len(found[way]) > 1
            else found[way] * 3
        )
        times = statistics.median(a / b for a, b in zip(found["vllm"], found[way], strict=True))
        lines.append(f"| {way} | {middle:.3f} | {low:.3f} – {high:.3f} | {times:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[2048, 4096], help="of the chunks of a prompt"
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    results = {}
    with tempfile.TemporaryDirectory() as store:
        bench = Bench(given.model, given.dtype, store, 2 * max(given.tokens))
        for tokens in given.tokens:
            results[tokens] = measure(bench, tokens, given.prompts)
            print(
                f"\n{tokens} tokens in chunks, {given.prompts} prompts\n\n{table(results[tokens])}",
                flush=True,
            )
    if given.out is not None:
        facts = {
            "model": given.model,
            "dtype": given.dtype,
            "cpus": os.cpu_count(),
            "machine": platform.processor(),
        }
        given.out.write_text(json.dumps({**facts, "seconds": results}, indent=1))


if __name__ == "__main__":
    main()
