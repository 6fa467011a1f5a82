"""Measures what a server reuses for a caller with a retriever of its own, against exact prefixes alone.

    .venv/bin/python lab/experiments/caller_chunks.py --output lab/results/caller_chunks.json

The documents are chunks of the natural benchmark's set. Every request has some of them, drawn by Zipf's law without replacement, in
random order, and a question. One server answers; it has two tenants, whose caches are apart. Each request goes to both, in turn
first: to one with recipe weave, to the other with recipe prefix. The client is the package `openai`. Times are the client's, until the
first token. `prepared` are tokens whose KV the server had prepared, `left` those whose KV earlier requests left after other chunks, `exact`
those whose KV was computed after exactly the same text.
"""

import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import httpx
from openai import OpenAI

from experiment import (
    add_model,
    argument_parser,
    command_of,
    environment,
    rounded,
    run_script,
    shown_model,
    write_result,
)
from kvweave.documents.chunking import Chunker
from kvweave.models.loading import load_model
from kvweave.types import Document
from kvweave_lab.eval.natural.questions import shipped_set

KEYS: Final = {"weave": "chunks-anywhere", "prefix": "exact-prefixes"}
STARTING_S: Final = 300


class Reply(NamedTuple):
    """One answer: seconds to its first token, that token's text, and the tokens of the prompt by the origin of their KV."""

    first_token_s: float
    first_token: str
    tokens: dict[str, int]


def main() -> None:
    """Start the server, send the requests, and summarize them by the number of requests before."""
    parser = argument_parser(__doc__)
    add_model(parser)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--per-request", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--pause-s", type=float, default=0.0, help="seconds between two requests")
    options = parser.parse_args()
    model, content, chance = options.model, shipped_set(), random.Random(1)
    chunker = Chunker(load_model(model).tokenizer, options.chunk_tokens, 0)
    documents = [Document(name, name, text, name) for name, text in content.documents.items()]
    chunks = [chunk.text for document in documents for chunk in chunker.split(document)]
    texts = chance.sample(chunks, options.documents)
    questions = [question.text for question in content.questions]
    rows: list[dict[str, Any]] = []
    seen: Counter[int] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        url, server = started(Path(folder), model)
        clients = {name: OpenAI(base_url=f"{url}/v1", api_key=key) for name, key in KEYS.items()}
        try:
            for number in range(options.requests):
                drawn = draw(chance, options.documents, options.per_request, options.exponent)
                documents = [{"id": str(each), "text": texts[each]} for each in drawn]
                question, order = chance.choice(questions), list(KEYS)[:: 1 if number % 2 else -1]
                replies = {name: ask(clients[name], name, question, documents) for name in order}
                row = {
                    "seen_twice": all(seen[each] > 1 for each in drawn),
                    "new": sum(not seen[each] for each in drawn),
                }
                seen.update(drawn)
                rows.append(row | {name: reply._asdict() for name, reply in replies.items()})
                time.sleep(options.pause_s)
        finally:
            server.terminate()
            server.wait()
    about = {**environment(command_of(options)), "model": shown_model(options)}
    summary = {
        "all": summarized(rows),
        "by 50 requests": [summarized(rows[first : first + 50]) for first in range(0, len(rows), 50)],
        "requests whose documents were all seen twice before": summarized(
            [row for row in rows if row["seen_twice"]]
        ),
        "the others": summarized([row for row in rows if not row["seen_twice"]]),
    }
    print(summary)
    write_result(rounded({**about, **summary, "requests": rows}), options.output)


def draw(chance: random.Random, documents: int, count: int, exponent: float) -> list[int]:
    """Return different documents in random order, the n-th with a probability in proportion to n ** -exponent."""
    weights, drawn = [(number + 1) ** -exponent for number in range(documents)], list[int]()
    while len(drawn) < count:
        (number,) = chance.choices(range(documents), weights)
        if number not in drawn:
            drawn.append(number)
    chance.shuffle(drawn)
    return drawn


def ask(client: OpenAI, recipe: str, question: str, documents: Sequence[dict[str, str]]) -> Reply:
    """Send a request and read its answer of four tokens."""
    began, first_s, first, plan = time.perf_counter(), 0.0, "", {}
    stream = client.chat.completions.create(
        model="kvweave",
        messages=[{"role": "user", "content": question}],
        max_tokens=4,
        stream=True,
        extra_body={"documents": documents, "kvweave": {"recipe": recipe}},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content and not first:
            first_s, first = time.perf_counter() - began, chunk.choices[0].delta.content
        plan = (chunk.model_extra or {}).get("kvweave", {}).get("plan", plan)
    tokens = Counter[str]()
    for span in plan["spans"]:
        length, origin = span["end"] - span["start"], span["origin"]
        if origin == "reused":
            origin = "left" if "(observed)" in span["reason"] else "prepared"
        tokens[origin] += length - span["recomputed_tokens"]
        tokens["recomputed"] += span["recomputed_tokens"]
    return Reply(first_s, first, dict(tokens))


def summarized(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return shares of the prompts' tokens by origin, and times; the ratio's median is over the requests."""
    if not rows:
        return {"requests": 0}
    ratios = [row["weave"]["first_token_s"] / row["prefix"]["first_token_s"] for row in rows]
    quartiles = sorted(ratios)
    return {
        "requests": len(rows),
        "ttft_ratio": median(ratios),
        "ttft_ratio_quartiles": [quartiles[len(ratios) // 4], quartiles[3 * len(ratios) // 4]],
        "same_first_token": fmean(
            row["weave"]["first_token"] == row["prefix"]["first_token"] for row in rows
        ),
        **{
            name: {**shares(rows, name), "ttft_s": median(row[name]["first_token_s"] for row in rows)}
            for name in KEYS
        },
    }


def shares(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    """Return the shares of prompt tokens by origin, and that of all tokens whose stored KV was found."""
    total = Counter[str]()
    for row in rows:
        total.update(row[name]["tokens"])
    found = total.total() - total["fresh"]
    return {origin: count / total.total() for origin, count in total.items()} | {
        "found": found / total.total()
    }


def started(folder: Path, model: str) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a server and return its address when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tenants = folder / "tenants.toml"
    tenants.write_text(
        "[tenants]\n" + "".join(f'{name} = "{key}"\n' for name, key in KEYS.items()), encoding="utf-8"
    )
    tenants.chmod(0o600)
    command = [
        Path(sys.executable).with_name("kvweave"),
        "serve",
        "--home",
        folder / "home",
        "--port",
        port,
        "--model",
        model,
    ]
    server = subprocess.Popen(
        [*map(str, command), "--tenants", str(tenants)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTING_S
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return url, server
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    server.terminate()
    raise OSError(f"the server was not ready after {STARTING_S} s")


if __name__ == "__main__":
    run_script(main)
