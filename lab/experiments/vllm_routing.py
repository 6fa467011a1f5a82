"""Simulates vLLM replicas behind a router: what the session key keeps in memory, and what that is worth.

    .venv/bin/python lab/experiments/vllm_routing.py --output lab/results/vllm_routing.json

Each replica serves one request after another, in the order of arrival, and keeps the latest chunks in a bounded memory. Chunks that
are not there come from a shared store, or, without one, are prefilled. Their popularity is Zipf's, their order in a prompt random, their
length 64 to 512 tokens; requests arrive as a Poisson process. Every policy gets the same requests at the same moments.

    session     consistent hashing of `kvweave_vllm.session_key`, as vllm-router's `consistent_hash`
    bounded     the same, but past replicas that have more than BOUND times their share of requests in flight
    sticky      a key's first request goes to the least loaded replica, all others after it
    loaded      the replica with the fewest requests in flight
    turns       round robin
    prefix      the replica that had the longest of the prompt's prefixes of chunks; without one, the least loaded
    informed    the replica where the request would have its first token soonest, if a router knew every replica's memory and queue

`hit` is the share of chunk tokens that were in the replica's memory, `ttft_p95_s` the 95th percentile of the time to the first token:
wait and service, `busiest` the requests of the busiest replica over the mean of all. The first WARM requests are not counted. Where a
replica gets more than it can serve, its queue grows as long as requests come, so that the p95 depends on their number and says no
more than that. Means over seeds with 95 % intervals by bootstrap. `over_best` is the
session key's p95 over that of the best policy but the informed one, seed by seed, `over_informed` over the informed one's. `load` is
the rate of arrivals over what all replicas would serve if nothing were in their memory.

Times are measured, in one process on two cores of a CPU: those of vLLM are below, those of the store in lab/results/tiers.json. Not
simulated: batches of several requests, decoding, the network of a store that several replicas ask at once, replicas that come and go, and
GPUs, on which rows take less of the time and loading more.
"""

import argparse
import bisect
import json
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np

from experiment import argument_parser, command_of, environment, rounded, run_script, write_result
from kvweave_lab.bench.serving.traffic import ServedTraffic, arrivals_s
from kvweave_lab.statistics import interval_over_tasks
from kvweave_vllm import session_key

RESULTS: Final = Path(__file__).parents[1] / "results"
REPLICAS: Final = (2, 4, 8, 16, 32, 64)
CONTEXT_TOKENS: Final = 2048  # of the measurement below
MEASURED_S: Final = {"vllm": 9.46, "rows 0": 0.25, "rows 0.1": 1.11}
"""Seconds to the first token over CONTEXT_TOKENS: all prefilled, stored KV alone, and 10 % of rows (lab/docs/vllm.md)."""
RATIO: Final = 0.1
BYTES_PER_TOKEN: Final = 24 * 2 * 2 * 64 * 4  # of the model measured, in float32
STORES: Final = ("redis", "none")
EXPONENTS: Final = (0.6, 1.0)
UNIT, MOST_UNITS = 64, 8
"""Chunks have 1 to 8 times so many tokens."""
BOUND: Final = 1.25
WARM: Final = 1 / 3
RING: Final = 160
"""Points of a replica on the ring, as in vllm-router."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a request: `fixed_s`, and for each chunk token that is reused or that is not in the replica's memory."""

    fixed_s: float
    reused_s: float
    missed_s: float
    prefills: bool  # what is missed is prefilled, and so not reused

    @classmethod
    def of(cls, measured: dict[str, float], store: str) -> "Costs":
        """Return the costs with a shared store, or with "none"."""
        fixed = measured["rows 0"]
        reused = (measured["rows 0.1"] - fixed) / CONTEXT_TOKENS
        if store == "none":
            return cls(fixed, reused, (measured["vllm"] - fixed) / CONTEXT_TOKENS, prefills=True)
        return cls(fixed, reused, BYTES_PER_TOKEN * load_s_per_byte(store), prefills=False)

    def service_s(self, tokens: int, missed: int) -> float:
        """Return the seconds of a request with so many chunk tokens."""
        reused = tokens - missed if self.prefills else tokens
        return self.fixed_s + self.reused_s * reused + self.missed_s * missed


def load_s_per_byte(store: str) -> float:
    """Return the measured seconds per byte until all layers of all chunks of a prompt are there."""
    tiers = json.loads((RESULTS / "tiers.json").read_text(encoding="utf-8"))["tiers"]
    (found,) = (tier for tier in tiers if (tier["tier"], tier["storage"]) == (store, "exact"))
    return float(found["all_layers_s"][0] / found["bytes"])


def measured_times(path: Path | None) -> dict[str, float]:
    """Return medians of a file that integrations/vllm/ttft.py wrote; MEASURED_S without a file."""
    if path is None:
        return dict(MEASURED_S)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    medians = {row["way"]: row["quartiles"][1] for row in rows if row["tokens"] == CONTEXT_TOKENS}
    return {way: medians[way] for way in MEASURED_S}


@dataclass(frozen=True)
class Request:
    """One request: its chunks in order, their tokens, and its session key."""

    chunks: tuple[int, ...]
    tokens: tuple[int, ...]
    key: str


class Replica:
    """One replica: its queue and the chunks in its memory, the one that was used longest ago first."""

    def __init__(self, costs: Costs, memory_tokens: int) -> None:
        self._costs, self._room = costs, memory_tokens
        self._memory: OrderedDict[int, int] = OrderedDict()
        self._ends: deque[float] = deque()
        self.free_s = 0.0

    def in_flight(self, now: float) -> int:
        """Return the requests that have not had their first token."""
        while self._ends and self._ends[0] <= now:
            self._ends.popleft()
        return len(self._ends)

    def missed(self, request: Request) -> int:
        """Return how many of the request's chunk tokens are not in memory."""
        pairs = zip(request.chunks, request.tokens, strict=True)
        return sum(tokens for chunk, tokens in pairs if chunk not in self._memory)

    def ttft_s(self, request: Request, now: float) -> float:
        """Return when the request would have its first token, from now."""
        service = self._costs.service_s(sum(request.tokens), self.missed(request))
        return max(self.free_s - now, 0.0) + service

    def serve(self, request: Request, now: float) -> float:
        """Serve a request after those before it; return its time to the first token."""
        ttft = self.ttft_s(request, now)
        self.free_s = now + ttft
        self._ends.append(self.free_s)
        for chunk, tokens in zip(request.chunks, request.tokens, strict=True):
            self._room -= 0 if self._memory.pop(chunk, 0) else tokens
            self._memory[chunk] = tokens
        while self._room < 0:
            self._room += self._memory.popitem(last=False)[1]
        return ttft


Policy = Callable[[Request, Sequence[Replica], float], int]
"""Chooses a replica by its number for a request that arrives now."""


class Ring:
    """Consistent hashing of keys to replicas."""

    def __init__(self, replicas: int) -> None:
        self._points = _points(replicas)

    def walk(self, key: str) -> Iterable[int]:
        """Yield replicas from a key's place on, some of them several times."""
        start = bisect.bisect(self._points, (_hash(key), 0))
        for step in range(len(self._points)):
            yield self._points[(start + step) % len(self._points)][1]


@cache
def _points(replicas: int) -> list[tuple[int, int]]:
    points = ((_hash(f"{number}/{point}"), number) for number in range(replicas) for point in range(RING))
    return sorted(points)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def least_loaded(replicas: Sequence[Replica], now: float) -> int:
    """Return the replica with the fewest requests in flight; of equals the one that is free first."""
    return min(range(len(replicas)), key=lambda each: (replicas[each].in_flight(now), replicas[each].free_s))


def session(replicas: int) -> Policy:
    """Return consistent hashing of the session key."""
    ring = Ring(replicas)
    return lambda request, replicas, now: next(iter(ring.walk(request.key)))


def bounded(replicas: int) -> Policy:
    """Return consistent hashing with bounded loads (arXiv 1608.01350)."""
    ring = Ring(replicas)

    def choose(request: Request, replicas: Sequence[Replica], now: float) -> int:
        loads = [replica.in_flight(now) for replica in replicas]
        most = BOUND * (sum(loads) + 1) / len(loads)
        return next(each for each in ring.walk(request.key) if loads[each] < most)

    return choose


def sticky(replicas: int) -> Policy:
    """Return the replica that had the session key before, as vllm-router's `sticky_least_loaded`."""
    had: dict[str, int] = {}

    def choose(request: Request, replicas: Sequence[Replica], now: float) -> int:
        if request.key not in had:
            had[request.key] = least_loaded(replicas, now)
        return had[request.key]

    return choose


def loaded(replicas: int) -> Policy:
    """Return the least loaded."""
    return lambda request, replicas, now: least_loaded(replicas, now)


def turns(replicas: int) -> Policy:
    """Return round robin."""
    turn = iter(range(10**9))
    return lambda request, replicas, now: next(turn) % len(replicas)


def prefix(replicas: int) -> Policy:
    """Return the longest prefix of chunks that a replica had."""
    had: dict[tuple[int, ...], int] = {}

    def choose(request: Request, replicas: Sequence[Replica], now: float) -> int:
        ends = range(len(request.chunks), 0, -1)
        known = (had[request.chunks[:end]] for end in ends if request.chunks[:end] in had)
        found = next(known, None)
        chosen = least_loaded(replicas, now) if found is None else found
        had.update((request.chunks[:end], chosen) for end in ends)
        return chosen

    return choose


def informed(replicas: int) -> Policy:
    """Return the soonest first token."""
    return lambda request, replicas, now: min(
        range(len(replicas)), key=lambda each: replicas[each].ttft_s(request, now)
    )


POLICIES: Final = {
    policy.__name__: policy for policy in (session, bounded, sticky, loaded, turns, prefix, informed)
}


@dataclass(frozen=True)
class Setting:
    """What is simulated beside the policy; `load` is the rate over what all replicas serve if nothing is in memory."""

    chunks: int
    per_request: int
    exponent: float
    memory_share: float
    load: float
    requests_per_replica: int

    @property
    def memory_tokens(self) -> int:
        """What a replica keeps, for chunks of the mean length."""
        return round(self.memory_share * self.chunks * UNIT * (1 + MOST_UNITS) / 2)


def draw(setting: Setting, seed: int, count: int) -> list[Request]:
    """Return requests, equal for an equal seed; a longer draw begins with the same ones."""
    units = np.random.default_rng(seed).integers(1, MOST_UNITS + 1, setting.chunks)
    ids = [
        (number,) * int(size) for number, size in enumerate(units)
    ]  # the key needs the lengths' ratios alone
    traffic = ServedTraffic(setting.chunks, setting.per_request, exponent=setting.exponent, seed=seed)
    requests = []
    for served in traffic.draw(count):
        own = [ids[chunk] for chunk in served.documents]
        requests.append(Request(served.documents, tuple(UNIT * len(each) for each in own), session_key(own)))
    return requests


def simulate(
    requests: Sequence[Request], policy: Policy, replicas: int, costs: Costs, setting: Setting, seed: int
) -> dict[str, float]:
    """Return the figures of one policy."""
    cold = statistics.mean(costs.service_s(sum(each.tokens), sum(each.tokens)) for each in requests)
    moments = arrivals_s(setting.load * replicas / cold, len(requests), seed)
    servers = [Replica(costs, setting.memory_tokens) for _ in range(replicas)]
    first = round(WARM * len(requests))
    ttfts, wanted, missed, served = [], 0, 0, [0] * replicas
    for number, (request, now) in enumerate(zip(requests, moments, strict=True)):
        chosen = policy(request, servers, now)
        if number >= first:
            served[chosen] += 1
            wanted, missed = wanted + sum(request.tokens), missed + servers[chosen].missed(request)
        ttfts.append(servers[chosen].serve(request, now))
    return {
        "hit": 1 - missed / wanted,
        "ttft_p95_s": float(np.percentile(ttfts[first:], 95)),
        "busiest": max(served) / statistics.mean(served),
    }


def compare(
    replicas: int, costs: Costs, setting: Setting, streams: Sequence[Sequence[Request]]
) -> dict[str, Any]:
    """Return a row with every policy at one number of replicas, over one stream of requests for each seed."""
    count = replicas * setting.requests_per_replica
    found = {
        name: [
            simulate(stream[:count], policy(replicas), replicas, costs, setting, seed)
            for seed, stream in enumerate(streams)
        ]
        for name, policy in POLICIES.items()
    }
    others = [name for name in POLICIES if name != informed.__name__]
    best = min(others, key=lambda name: statistics.mean(each["ttft_p95_s"] for each in found[name]))
    return {
        "replicas": replicas,
        "policies": {
            name: {what: _interval([each[what] for each in own]) for what in own[0]}
            for name, own in found.items()
        },
        "best": best,
        "over_best": _over(found, best),
        "over_informed": _over(found, informed.__name__),
    }


def _over(found: dict[str, list[dict[str, float]]], other: str) -> dict[str, float]:
    pairs = zip(found[session.__name__], found[other], strict=True)
    return _interval([own["ttft_p95_s"] / theirs["ttft_p95_s"] for own, theirs in pairs])


def _interval(values: Sequence[float]) -> dict[str, float]:
    return asdict(interval_over_tasks([values]))


def result(args: argparse.Namespace) -> dict[str, Any]:
    """Return the result without the environment."""
    names = ("chunks", "per_request", "memory_share", "load", "requests_per_replica")
    measured = measured_times(args.times)
    count = max(args.replicas or REPLICAS) * args.requests_per_replica
    rows = []
    for exponent in args.exponent or EXPONENTS:
        setting = Setting(exponent=exponent, **{name: getattr(args, name) for name in names})
        streams = [draw(setting, seed, count) for seed in range(args.seeds)]
        for store in args.store or STORES:
            costs = Costs.of(measured, store)
            for replicas in args.replicas or REPLICAS:
                row = compare(replicas, costs, setting, streams)
                rows.append({"exponent": exponent, "store": store, **row})
    return {
        "measured_s": measured,
        "ratio": RATIO,
        "costs": {store: asdict(Costs.of(measured, store)) for store in args.store or STORES},
        **{name: getattr(args, name) for name in names},
        "seeds": args.seeds,
        "rows": rows,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--replicas", type=int, action="append", help=f"repeatable; default: {REPLICAS}")
    parser.add_argument(
        "--store", action="append", choices=(*STORES, "s3"), help=f"repeatable; default: {STORES}"
    )
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--per-request", type=int, default=8, help="chunks")
    parser.add_argument(
        "--exponent",
        type=float,
        action="append",
        help=f"of the chunks' popularity; repeatable; default: {EXPONENTS}",
    )
    parser.add_argument("--memory-share", type=float, default=0.1, help="of the corpus that a replica keeps")
    parser.add_argument(
        "--load", type=float, default=0.5, help="arrivals over what replicas with an empty memory serve"
    )
    parser.add_argument("--requests-per-replica", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--times", type=Path, help="JSON that integrations/vllm/ttft.py wrote")
    args = parser.parse_args()
    write_result(rounded({**result(args), **environment(command_of(args))}), args.output)


if __name__ == "__main__":
    run_script(main)
