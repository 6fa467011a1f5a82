"""`kvweave bench serve`: servers under the same Poisson arrivals, one after the other in every rate and round.

All servers run at the same time, each with everything stored, and all but the measured one are stopped (SIGSTOP): a server's
idle work costs the others nothing. Rates rise; a system that a rate has saturated is spared the higher ones. Systems may have rates of their own.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvweave.files import write_atomically
from kvweave.state.knowledge_base_state import Progress, no_progress
from kvweave_lab.bench.serving.client import run_in_turn, run_open_loop
from kvweave_lab.bench.serving.processes import MemoryWatch, ServerFailed
from kvweave_lab.bench.serving.summary import AtEqualTtft, Phase, at_equal_ttft, parse_phase, summarize
from kvweave_lab.bench.serving.systems import LLAMA, STORES_NOTHING, System, SystemSettings, tokenizer_of
from kvweave_lab.bench.serving.traffic import (
    Corpus,
    ServedRequest,
    ServedTraffic,
    arrivals_s,
    exact_prefix_share,
)
from kvweave_lab.report import json_bytes
from kvweave_lab.results_log import ResultsLog

BASELINE = "prefix"
REFERENCE = "reference"
LOG_VERSION = 1
_RATES = "rates.json"
_SATURATED = 0.8
"""A system is saturated by a rate of which it serves less than this share."""
_SATURATED_RATES = 2
"""So many saturating rates of a system are measured; then it is spared higher ones."""
_RESTARTED = 2
"""Requests that a server answers before it is measured if its store is full, or if it stores nothing."""
_COUNTED_PROMPTS = 0.01
"""Prompt lengths of systems that differ by more than this share are no equal work."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What is served, and how it is asked for.

    Attributes:
        traffic: documents, requests, their popularity.
        systems: by name, in the order of the table.
        common: what all systems have in common.
        rates: arrivals per second, rising, of systems without rates of their own; empty: derived from what the systems can serve.
        own_rates: rising, of the systems that have some. Each system's first rate has the same requests as another one's, and so on.
        requests: arrivals of each system, rate and round.
        warm_requests: requests of the same stream that each server answers before, after one pass over all documents.
        rounds: how often every rate is measured.
        ttft_targets_s: p95 TTFT at which throughput is compared; empty: those of the baseline at each of its rates.
    """

    traffic: ServedTraffic
    systems: tuple[str, ...]
    common: SystemSettings
    rates: tuple[float, ...] = ()
    requests: int = 60
    warm_requests: int = 16
    rounds: int = 1
    ttft_targets_s: tuple[float, ...] = ()
    own_rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def rates_are_given(self) -> bool:
        """Whether no system's rates have to be derived."""
        return bool(self.rates) or set(self.systems) <= set(self.own_rates)

    def rates_of(self, system: str, common: Sequence[float]) -> Sequence[float]:
        """Return a system's rates, where those without rates of their own have the `common` ones."""
        return self.own_rates.get(system, common)


@dataclass(frozen=True, slots=True)
class ServeBench:
    """What was measured.

    Attributes:
        settings: what was asked.
        model: its name, without the folder it is in.
        prompt_tokens: mean tokens of a prompt, by system: equal work has equal prompts.
        stored_share: share of prompt tokens that each system's server took from its caches.
        phases: a row for each system, rate and round.
        equal: throughput at equal p95 TTFT.
    """

    settings: ServeSettings
    model: str
    prompt_tokens: dict[str, float]
    stored_share: dict[str, float]
    phases: list[Phase]
    equal: list[AtEqualTtft]


def bench_serve(
    settings: ServeSettings, folder: Path, output: Path | None = None, progress: Progress = no_progress
) -> ServeBench:
    """Measure the systems in turn.

    Args:
        settings: what is measured.
        folder: for homes and logs of the servers.
        output: for the log of phases, from which the same command resumes; None measures everything in one go.
        progress: is told of warm-ups and phases.

    Raises:
        ServerFailed: a server did not start, died, or failed a request while it was warmed up.
        InvalidRequest: `output` holds another measurement.
    """
    config = {"settings": _as_json(settings)}
    with ResultsLog(
        output, config, file="phases.jsonl", version=LOG_VERSION, key=_key, parse=parse_phase
    ) as log:
        if not _complete(settings, output, log.results):
            run = _Run(settings, folder, progress)
            with run.servers():
                common = settings.rates if settings.rates_are_given else _derived_rates(run, output)
                rates = {name: settings.rates_of(name, common) for name in settings.systems}
                for rate in sorted({rate for own in rates.values() for rate in own}):
                    places = {name: own.index(rate) for name, own in rates.items() if rate in own}
                    for number in range(settings.rounds):
                        slots = {name: 1 + at * settings.rounds + number for name, at in places.items()}
                        run.measure(rate, number, slots, log)
        return _result(settings, log.results)


def _derived_rates(run: "_Run", output: Path | None) -> list[float]:
    """Return rates from what the systems can serve; a run that resumes takes those it began with."""
    rates = _recorded_rates(output) or run.rates_from_capacity()
    if output is not None:
        write_atomically(output / _RATES, [json_bytes(rates)])
    return rates


def _recorded_rates(output: Path | None) -> list[float]:
    if output is None or not (output / _RATES).exists():
        return []
    return [float(rate) for rate in json.loads((output / _RATES).read_text())]


def _complete(settings: ServeSettings, output: Path | None, phases: Sequence[Phase]) -> bool:
    """Return whether an earlier run measured everything, so that no server has to start."""
    common = settings.rates if settings.rates_are_given else _recorded_rates(output)
    found = {_key(phase) for phase in phases}
    wanted = [
        (name, rate, number)
        for name in settings.systems
        if not is_saturated(phases, name, settings.traffic.seed)
        for rate in settings.rates_of(name, common)
        for number in range(settings.rounds)
    ]
    return bool(phases) and found.issuperset(wanted)


class _Run:
    """The servers of one measurement, and the stream of requests."""

    def __init__(self, settings: ServeSettings, folder: Path, progress: Progress) -> None:
        self._settings, self._progress = settings, progress
        corpus = Corpus(tokenizer_of(settings.common.model), settings.traffic)
        self._systems = [System(name, settings.common, corpus, folder) for name in settings.systems]
        self._covering = settings.traffic.covering()

    @contextmanager
    def servers(self) -> Iterator[None]:
        """Start and warm up every server, and pause it; end them all at the end."""
        with ExitStack() as stack:
            filled: dict[str, System] = {}
            for number, system in enumerate(self._systems):
                stack.enter_context(system.server)
                like = filled.setdefault(system.stores_like, system)
                if like is not system:
                    self._copy_store(like, system)
                system.start()
                self._warm_up(system, fill=like is system)
                system.server.pause()
                self._progress("servers", number + 1, len(self._systems))
            yield

    def rates_from_capacity(self) -> list[float]:
        """Return five rates around what the baseline serves at most, up to beyond what the fastest system does."""
        capacity: dict[str, float] = {}
        requests = self._stretch(0)[: max(4, self._settings.requests // 4)]
        for system in self._systems:
            replies = self._running(
                system, lambda url, calls: run_open_loop(url, calls, [0.0] * len(calls)), requests
            )
            answered = sum(reply.outcome == "answered" for reply in replies)
            capacity[system.name] = answered / max(reply.total_s for reply in replies)
        low = 0.5 * capacity.get(BASELINE, min(capacity.values()))
        high = 1.1 * max(capacity.values())
        steps = 5
        return [round(low * (high / low) ** (step / (steps - 1)), 4) for step in range(steps)]

    def measure(
        self, rate: float, number: int, slots: Mapping[str, int], log: ResultsLog[Any, Phase]
    ) -> None:
        """Measure each system that this rate is not too high for, in an order of the round's own.

        `slots` has the systems that are measured at this rate, and says for each which stretch of the stream it gets.
        """
        order = [system for system in self._systems if system.name in slots]
        random.Random(f"{self._settings.traffic.seed}/{rate}/{number}").shuffle(order)
        for place, system in enumerate(order):
            spared = is_saturated(log.results, system.name, self._settings.traffic.seed)
            if log.get((system.name, rate, number)) is None and not spared:
                log.add(self._phase(system, slots[system.name], rate, number))
            self._progress(f"{rate:g} requests/s, round {number + 1}", place + 1, len(order))

    def _phase(self, system: System, slot: int, rate: float, number: int) -> Phase:
        requests = self._stretch(slot)
        moments = arrivals_s(rate, len(requests), self._settings.traffic.seed + number)
        server = system.server
        with MemoryWatch(server.pid) as memory:
            replies = self._running(system, lambda url, calls: run_open_loop(url, calls, moments), requests)
        if not server.alive:
            raise ServerFailed(f"{system.name} ended while it was measured; its log is {server.log}")
        return summarize(
            replies,
            system=system.name,
            rate=rate,
            round=number,
            prefix_share=exact_prefix_share(requests, self._before(slot)),
            peak_bytes=memory.peak.resident,
            peak_anonymous_bytes=memory.peak.anonymous,
        )

    def _running(self, system: System, run: Callable[..., Any], requests: Sequence[ServedRequest]) -> Any:
        """Run requests while the system's server is the only one that is not paused."""
        system.server.resume()
        try:
            return run(system.server.url, [system.call(request) for request in requests])
        finally:
            system.server.pause()

    def _copy_store(self, filled: System, system: System) -> None:
        """Give a system what another one has stored, as that one's server leaves it when it ends."""
        filled.server.terminate()
        shutil.copytree(filled.home, system.home, dirs_exist_ok=True)
        filled.start()
        self._warm_up(filled, fill=False)
        filled.server.pause()

    def _warm_up(self, system: System, *, fill: bool) -> None:
        """Let the server answer the beginning of the stream; to `fill` its store, after a pass over all documents.

        llama-server keeps the latest prompts alone, of which that pass would leave nothing.
        """
        warm = self._warm()
        if not fill or system.stores_like == STORES_NOTHING:
            calls = [system.call(request) for request in warm[:_RESTARTED]]
        else:
            covering = [] if system.stores_like == LLAMA else self._covering
            calls = [system.call(request, new_tokens=1) for request in covering]
            calls += [system.call(request) for request in warm]
        for reply in run_in_turn(system.server.url, calls):
            if reply.outcome != "answered":
                raise ServerFailed(f"{system.name} did not answer while it was warmed up: {reply.detail}")

    def _warm(self) -> list[ServedRequest]:
        return self._settings.traffic.draw(self._settings.warm_requests)

    def _stretch(self, slot: int) -> list[ServedRequest]:
        """Return the requests of a slot: its own part of the stream."""
        first = self._settings.warm_requests + slot * self._settings.requests
        return self._settings.traffic.draw(first + self._settings.requests)[first:]

    def _before(self, slot: int) -> list[ServedRequest]:
        first = self._settings.warm_requests + slot * self._settings.requests
        return [*self._covering, *self._settings.traffic.draw(first)]


def _result(settings: ServeSettings, phases: list[Phase]) -> ServeBench:
    """Return everything that was measured."""
    names = [name for name in settings.systems if any(one.system == name for one in phases)]
    own = {name: [one for one in phases if one.system == name] for name in names}
    prompts = {name: _sum(own[name], "prompt_tokens") for name in names}
    return ServeBench(
        settings,
        Path(settings.common.model or REFERENCE).name,
        {name: prompts[name] / max(1, _sum(own[name], "answered")) for name in names},
        {name: _sum(own[name], "cached_tokens") / max(1, prompts[name]) for name in names},
        phases,
        at_equal_ttft(phases, BASELINE, settings.ttft_targets_s),
    )


def is_saturated(phases: Sequence[Phase], system: str, seed: int) -> bool:
    """Whether a system has served too small a share of the requests at so many rates that it is spared higher ones."""
    rates = {
        one.rate
        for one in phases
        if one.system == system and one.requests_per_s < _SATURATED * _arrived_per_s(one, seed)
    }
    return len(rates) >= _SATURATED_RATES


def _arrived_per_s(phase: Phase, seed: int) -> float:
    """Return the arrivals per second as they were drawn, which are few and may be far from the rate."""
    span_s = arrivals_s(phase.rate, phase.requests, seed + phase.round)[-1]
    return phase.requests / span_s if span_s else phase.rate


def unequal_prompts(done: ServeBench) -> list[str]:
    """Return the systems whose prompts have other lengths than the first system's: their work is not the same."""
    (_, expected), *others = done.prompt_tokens.items()
    return [name for name, tokens in others if abs(tokens - expected) > _COUNTED_PROMPTS * expected]


def _key(phase: Phase) -> tuple[str, float, int]:
    return phase.system, phase.rate, phase.round


def _sum(phases: Sequence[Phase], name: str) -> int:
    return sum(int(getattr(one, name)) for one in phases)


def _as_json(settings: ServeSettings) -> dict[str, Any]:
    content = asdict(settings)
    content["common"]["gguf"] = None if settings.common.gguf is None else settings.common.gguf.name
    return content
