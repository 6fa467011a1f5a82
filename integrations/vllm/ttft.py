"""Time to the first token in vLLM at several shares of recomputed rows, against vLLM without kvweave and with its prefix cache.

    PYTHONPATH=../../lab/src python ttft.py MODEL --tokens 2048 --tokens 4096 --prompts 20 --out ttft.json

Every prompt is run in each way in turn, in one process, so that what slows the machine slows all of them. Ways:

    vllm        vLLM's own prefill of the whole prompt, nothing cached
    prefix      vLLM's prefix cache, after another prompt with the same chunks in another order
    rows R      kvweave with ratio R of the chunks' tokens (recipe epic, which needs no pass to select)
    alone R     a prompt of as many tokens as `rows R` computes, rows and question: what they cost without the other tokens
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from in_process import InProcess, report
from natural_prompts import CHUNK_TOKENS, model_folder

RATIOS = (0.0, 0.1, 0.15, 0.3, 1.0)
QUESTION = "Which of these texts names a year, and which year is it?"


def natural_chunks(tokenizer: Any, count: int, seed: int) -> list[str]:
    """Return pieces of the natural sample documents, in a random order; the same texts again where they are too few."""
    from kvweave.samples import DOCUMENTS

    texts = [path.read_text() for path in sorted((DOCUMENTS.parent / "natural").iterdir())]
    ids = [token for text in texts for token in tokenizer(text)["input_ids"]]
    start = random.Random(seed).randrange(len(ids))
    size = CHUNK_TOKENS - 2
    rolled = (ids[start:] + ids[:start]) * (1 + count * size // len(ids))
    return [tokenizer.decode(rolled[n * size : (n + 1) * size]) for n in range(count)]


def measure(vllm: InProcess, tokens: int, prompts: int, ratios: Sequence[float]) -> dict[str, list[float]]:
    """Return the seconds of each way for each prompt."""
    import kvweave_vllm

    def seconds(body: dict[str, Any]) -> float:
        began = time.perf_counter()
        vllm.generate(body)
        return time.perf_counter() - began

    tokenizer = vllm.llm.get_tokenizer()
    found: dict[str, list[float]] = {}
    for number in range(prompts):
        chunks = natural_chunks(tokenizer, tokens // CHUNK_TOKENS, number)
        for body in kvweave_vllm.preparations(tokenizer, chunks, recipe="epic"):
            vllm.generate(body)
        shuffled = kvweave_vllm.request(tokenizer, chunks[::-1], QUESTION, recipe="full")
        ways: list[tuple[str, dict[str, Any]]] = []
        for ratio in ratios:
            body = kvweave_vllm.request(tokenizer, chunks, QUESTION, recipe="epic", ratio=ratio)
            ids, spans = body["prompt"], body["extra_body"]["kv_transfer_params"]["kvweave"]["spans"]
            inside = spans[-1][1] - spans[0][0]
            ways.append((f"rows {ratio:g}", body))
            if ratio < 1:
                computed = len(ids) - inside + round(ratio * inside)
                ways.append((f"alone {ratio:g}", {"prompt": ids[:computed]}))
        ways += [("vllm", {"prompt": ids}), ("prefix", {"prompt": ids})]
        random.Random(number).shuffle(ways)
        for way, body in ways:
            vllm.forget()
            if way == "prefix":
                vllm.generate(shuffled)
            found.setdefault(way, []).append(seconds(body))
        print(f"{tokens} tokens, {number + 1} of {prompts} prompts", file=sys.stderr, flush=True)
    return found


def row(way: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """Return a way's seconds, their quartiles, and the median of how many times as long vLLM's own prefill takes."""
    seconds = found[way]
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    times = statistics.median(own / each for own, each in zip(found["vllm"], seconds, strict=True))
    return {"way": way, "seconds": seconds, "quartiles": quartiles, "vllm_over_way": times}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or name, or one of `make real`")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--tokens", type=int, action="append", help="of a prompt's chunks; repeatable; default: 2048, 4096"
    )
    parser.add_argument(
        "--ratio", type=float, action="append", help="of rows; repeatable; default: all in the page"
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    args.tokens, args.ratio = args.tokens or [2048, 4096], args.ratio or list(RATIOS)
    with tempfile.TemporaryDirectory() as store:
        vllm = InProcess(model_folder(args.model), args.dtype, store, 2 * max(args.tokens))
        found = {tokens: measure(vllm, tokens, args.prompts, args.ratio) for tokens in args.tokens}
        vllm.close()
    rows = [{"tokens": tokens, **row(way, each)} for tokens, each in found.items() for way in sorted(each)]
    report("ttft.py", args, {"rows": rows})


if __name__ == "__main__":
    main()
