"""Tries to tell from the time to a first token whether another tenant of a server has a document cached.

    .venv/bin/python lab/experiments/tenant_timing.py --probes 500 --output lab/results/tenant_timing.json

A server with two tenants is idle but for this script. Before each probe somebody sends a request: over the probed document
(the document is then cached for that tenant), or over another one of the same length. The probe is the attacker's request
over a document that it has never sent itself. Somebody is the other tenant, or as the positive control the attacker. All
cases come in random order, each document is used once, and the attacker's guess is the shorter time.

The AUC is the probability that a probe of a cached document is faster than one of an uncached document: 0.5 tells nothing.
Intervals are by bootstrap over probes.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave_lab.bench.serving.client import Call, http_client, timed_reply
from kvweave_lab.bench.serving.processes import ServerFailed, ServerProcess, kvweave_server
from kvweave_lab.bench.serving.systems import documents_call, served_model, tokenizer_of
from kvweave_lab.bench.workload import words_text

KEYS = {"attacker": "attacker-key-for-timing", "other": "other-key-for-timing"}
WAYS = ("documents", "chat")
"""How the text is sent: as documents, whose KV is reused anywhere, or in a chat, whose exact prefix is."""
RESAMPLES = 2000
WARM_UPS = 3


@dataclass(frozen=True)
class Case:
    """One probe: by which way, who sent a request before it, and whether that was over the probed document."""

    way: str
    before: str
    cached: bool


@dataclass(frozen=True)
class Probe:
    """What the attacker measured."""

    case: Case
    ttft_s: float


def cases(ways: Sequence[str], probes: int, seed: int) -> list[Case]:
    """Return every case `probes` times, in random order."""
    kinds = [Case(way, before, cached) for way in ways for before in KEYS for cached in (True, False)]
    order = [kind for kind in kinds for _ in range(probes)]
    random.Random(seed).shuffle(order)
    return order


async def measure(server: ServerProcess, order: Sequence[Case], texts: "Texts", idle_s: float) -> list[Probe]:
    """Send the request before and the probe of each case, one after the other."""
    model = served_model(server.url, KEYS["attacker"])
    clients = {
        name: http_client(server.url, {"Authorization": f"Bearer {key}"}) for name, key in KEYS.items()
    }
    found = []
    try:
        for number, case in enumerate(order):
            probed, other = texts.pair(number)
            before = probed if case.cached else other
            await send(clients[case.before], request(case.way, before, f"Day {number}?", model))
            await asyncio.sleep(idle_s)
            ttft_s = await send(
                clients["attacker"], request(case.way, probed, f"Which room {number}?", model)
            )
            await asyncio.sleep(idle_s)
            found.append(Probe(case, ttft_s))
    finally:
        for client in clients.values():
            await client.aclose()
    return found


class Texts:
    """Texts of about `tokens` tokens, each used for one probe only; `first` is the number of the first one."""

    def __init__(self, tokenizer: Any, tokens: int, first: int) -> None:
        self._tokenizer, self._tokens, self._first = tokenizer, tokens, first

    def pair(self, number: int) -> tuple[str, str]:
        """Return the probed text of a probe, and one of the same length that the probe has nothing to do with."""
        return self._text(2 * number), self._text(2 * number + 1)

    def _text(self, number: int) -> str:
        return words_text(self._tokenizer, self._first + number, self._tokens)


def request(way: str, text: str, question: str, model: str) -> Call:
    """Return a request over a text, with one token as answer."""
    limits = {"model": model, "temperature": 0, "max_tokens": 1}
    if way == "documents":
        return documents_call(question, [{"id": "text", "text": text}], {}, **limits)
    return documents_call(f"{text}\n\n{question}", [], {}, **limits)


async def send(client: Any, call: Call) -> float:
    """Return a request's time to the first token. Raises ServerFailed."""
    reply = await timed_reply(client, call, 0, time.perf_counter(), 0.0)
    if reply.ttft_s is None:
        raise ServerFailed(f"the server did not answer: {reply.detail}")
    return reply.ttft_s


def auc(cached: Sequence[float], uncached: Sequence[float]) -> float:
    """Return the probability that a value of `cached` is smaller than one of `uncached`; equal ones count half."""
    theirs = np.sort(np.asarray(uncached))
    mine = np.asarray(cached)
    above = len(theirs) - np.searchsorted(theirs, mine, side="right")
    equal = np.searchsorted(theirs, mine, side="right") - np.searchsorted(theirs, mine, side="left")
    return float((above + equal / 2).mean() / len(theirs))


def auc_interval(cached: Sequence[float], uncached: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the AUC by bootstrap, each side resampled by itself."""
    draws = np.random.default_rng(seed)
    mine, theirs = np.asarray(cached), np.asarray(uncached)
    found = [
        auc(draws.choice(mine, len(mine)).tolist(), draws.choice(theirs, len(theirs)).tolist())
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)


def summarize(probes: Sequence[Probe]) -> list[dict[str, Any]]:
    """Return a row for each way and for who sent the request before."""
    rows = []
    for way, before in dict.fromkeys((probe.case.way, probe.case.before) for probe in probes):
        sides = [
            [probe.ttft_s for probe in probes if probe.case == Case(way, before, cached)]
            for cached in (True, False)
        ]
        rows.append(
            {
                "way": way,
                "before": before,
                "probes": [len(side) for side in sides],
                "auc": auc(*sides),
                "interval": auc_interval(*sides),
                "median_s": [statistics.median(side) for side in sides],
            }
        )
    return rows


def write_tenants(path: Path) -> None:
    """Write the server's file of tenants."""
    lines = [f'{name} = "{key}"' for name, key in KEYS.items()]
    path.write_text("\n".join(["[tenants]", *lines]) + "\n", encoding="utf-8")


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure on a server of its own and return the result."""
    tenants = folder / "tenants.toml"
    write_tenants(tenants)
    flags = ["--tenants", str(tenants), *(args.server_flag or [])]
    order = cases(args.way or WAYS, args.probes, args.seed)
    with kvweave_server("tenants", folder, model=args.model, flags=flags) as server:
        server.start()
        tokenizer = tokenizer_of(args.model)
        warm = [Case(way, before, True) for way in WAYS for before in KEYS] * WARM_UPS
        asyncio.run(measure(server, warm, Texts(tokenizer, args.tokens, 0), args.idle_s))
        probes = asyncio.run(
            measure(server, order, Texts(tokenizer, args.tokens, 2 * len(warm)), args.idle_s)
        )
    return {
        "model": args.model or "reference",
        "tokens": args.tokens,
        "probes": args.probes,
        "rows": summarize(probes),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--probes", type=int, default=500, help="of each case; there are four for each way")
    parser.add_argument("--way", choices=WAYS, action="append", help="default: both")
    parser.add_argument("--idle-s", type=float, default=0.02, help="rest after each request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server-flag", action="append")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(args, Path(folder))
    write_result(rounded(result) | environment(command_of(args)), args.output)


if __name__ == "__main__":
    run_script(main)
