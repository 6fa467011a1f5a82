"""What a run of requests amounts to: throughput, percentiles, and throughput at an equal time to the first token."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvweave_lab.bench.serving.client import Reply

TAIL = 0.95
"""The percentile at which systems are compared."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the requests that were answered; None without any."""

    p50: float
    p95: float
    p99: float


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """Return percentiles, interpolated between values; None if there are no values."""
    found = _at(values, (50, 95, 99))
    return Percentiles(*found) if found else None


@dataclass(frozen=True, slots=True)
class LongestGaps:
    """The longest time between two pieces of each answer, in seconds: percentiles over the answers, and the longest of all."""

    p50: float
    p95: float
    longest: float


def longest_gaps(values: Iterable[float | None]) -> LongestGaps | None:
    """As `percentiles`."""
    found = _at(values, (50, 95, 100))
    return LongestGaps(*found) if found else None


def _at(values: Iterable[float | None], percents: tuple[float, ...]) -> list[float]:
    """Return the values at these percentages, without those that are None; nothing if there are none."""
    found = [value for value in values if value is not None]
    return [float(value) for value in np.percentile(found, percents)] if found else []


@dataclass(frozen=True, slots=True)
class Phase:
    """One system under one rate of arrivals.

    Attributes:
        system, rate, round: which; the rate is requests per second.
        requests: number of arrivals; each is answered, refused or failed.
        refused_without_time: refusals that do not say when to try again.
        seconds: from the first arrival to the last reply.
        requests_per_s, tokens_per_s: answered requests and their output tokens, over `seconds`.
        ttft, tpot: seconds, of answered requests. TTFT counts from the moment that a request was due.
        gap: of answered requests; None too where it was not recorded.
        ttft_p95_of_all: the 95th percentile where a request that got no answer counts as endless; None if that is endless.
        prompt_tokens, cached_tokens, output_tokens: of answered requests, as the server counts them.
        prefix_share: share of documents that a prefix cache without limit would find.
        peak_bytes, peak_anonymous_bytes: largest memory of the server's process; anonymous memory is backed by no file.
        failures: what went wrong, the first few.
    """

    system: str
    rate: float
    round: int
    requests: int
    answered: int
    refused: int
    failed: int
    refused_without_time: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    ttft: Percentiles | None
    tpot: Percentiles | None
    ttft_p95_of_all: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefix_share: float
    peak_bytes: int
    peak_anonymous_bytes: int
    failures: tuple[str, ...]
    gap: LongestGaps | None = None


def summarize(replies: Sequence[Reply], **known: Any) -> Phase:
    """Return the summary of replies; `known` has the fields that replies do not contain."""
    answered = [reply for reply in replies if reply.outcome == "answered"]
    refused = [reply for reply in replies if reply.outcome == "refused"]
    failed = [reply for reply in replies if reply.outcome == "failed"]
    first = min(reply.arrived_s for reply in replies)
    seconds = max(reply.arrived_s + reply.total_s for reply in replies) - first
    tokens = sum(reply.output_tokens for reply in answered)
    return Phase(
        **known,
        requests=len(replies),
        answered=len(answered),
        refused=len(refused),
        failed=len(failed),
        refused_without_time=sum(not reply.retry_after for reply in refused),
        seconds=seconds,
        requests_per_s=len(answered) / seconds,
        tokens_per_s=tokens / seconds,
        ttft=percentiles(reply.ttft_s for reply in answered),
        tpot=percentiles(reply.tpot_s for reply in answered),
        gap=longest_gaps(reply.longest_gap_s for reply in answered),
        ttft_p95_of_all=_tail([reply.ttft_s for reply in replies]),
        prompt_tokens=sum(reply.prompt_tokens for reply in answered),
        cached_tokens=sum(reply.cached_tokens for reply in answered),
        output_tokens=tokens,
        failures=tuple(dict.fromkeys(reply.detail for reply in failed))[:3],
    )


def parse_phase(content: dict[str, Any]) -> Phase:
    """Return a phase from the line of a results log."""
    parts = {name: Percentiles(**content[name]) if content[name] else None for name in ("ttft", "tpot")}
    gap = LongestGaps(**content["gap"]) if content.get("gap") else None
    return Phase(**{**content, **parts, "gap": gap, "failures": tuple(content["failures"])})


def _tail(ttfts: Sequence[float | None]) -> float | None:
    """Return the smallest time within which 95 % of all requests had their first token; None if fewer ever had it."""
    answered = sorted(ttft for ttft in ttfts if ttft is not None)
    needed = math.ceil(TAIL * len(ttfts))
    return answered[needed - 1] if 0 < needed <= len(answered) else None


@dataclass(frozen=True, slots=True)
class AtEqualTtft:
    """What a system serves while 95 % of requests have their first token within a time.

    Attributes:
        system: which.
        ttft_s: the time.
        requests_per_s: interpolated between measured rates; None if even the lowest rate takes longer.
        at_least: whether the system kept within the time at every measured rate, so that it may serve more.
        of_baseline: relative to the baseline; None where one of both is None.
    """

    system: str
    ttft_s: float
    requests_per_s: float | None
    at_least: bool
    of_baseline: float | None


def at_equal_ttft(
    phases: Sequence[Phase], baseline: str, targets_s: Sequence[float] = ()
) -> list[AtEqualTtft]:
    """Return a row for each time and system, for comparison with the baseline; without times, for those of its own rates."""
    curves = {name: curve(phases, name) for name in dict.fromkeys(phase.system for phase in phases)}
    own = curves.get(baseline, [])
    rows: list[AtEqualTtft] = []
    for target in targets_s or sorted({tail for tail, _ in own if tail is not None}):
        base = throughput_within(own, target)[0]
        for name, points in curves.items():
            served, at_least = throughput_within(points, target)
            ratio = served / base if served and base else None
            rows.append(AtEqualTtft(name, target, served, at_least, ratio))
    return rows


Curve = list[tuple[float | None, float]]
"""By rising rate: the p95 TTFT of all requests (None is endless), and answered requests per second; medians of rounds."""


def curve(phases: Sequence[Phase], system: str) -> Curve:
    """Return the points of a system, by rising rate."""
    own = [phase for phase in phases if phase.system == system]
    points: Curve = []
    for rate in sorted({phase.rate for phase in own}):
        rounds = [phase for phase in own if phase.rate == rate]
        tails = [math.inf if one.ttft_p95_of_all is None else one.ttft_p95_of_all for one in rounds]
        tail = float(np.median(tails)) if all(map(math.isfinite, tails)) else sorted(tails)[len(tails) // 2]
        served = float(np.median([one.requests_per_s for one in rounds]))
        points.append((tail if math.isfinite(tail) else None, served))
    return points


def throughput_within(points: Curve, ttft_s: float) -> tuple[float | None, bool]:
    """Return the served rate at which a system's p95 TTFT first exceeds a time (linear between rates), and whether it never does."""
    before: tuple[float, float] | None = None
    for tail, served in points:
        if tail is None or tail > ttft_s:
            if before is None or tail is None:
                return (None if before is None else before[1]), False
            share = (ttft_s - before[0]) / (tail - before[0])
            return before[1] + share * (served - before[1]), False
        before = (tail, served)
    return (None, False) if before is None else (before[1], True)
