"""`kvweave bench serve`: arrivals, prefixes, percentiles, and throughput at an equal time to the first token."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from kvweave.errors import InvalidRequest
from kvweave_lab.bench.serving.client import Reply
from kvweave_lab.bench.serving.comparison import is_saturated
from kvweave_lab.bench.serving.summary import at_equal_ttft, parse_phase, summarize, throughput_within
from kvweave_lab.bench.serving.systems import SystemSettings, chosen_rates, chosen_systems
from kvweave_lab.bench.serving.traffic import ServedRequest, ServedTraffic, arrivals_s, exact_prefix_share

KNOWN = {"rate": 1.0, "round": 0, "prefix_share": 0.1, "peak_bytes": 5, "peak_anonymous_bytes": 4}


def answered(number, ttft_s, arrived_s=0.0):
    return Reply(number, "answered", arrived_s, ttft_s, ttft_s + 1, 0.1, 100, 60, 11)


def refused(number, retry_after=True):
    return Reply(number, "refused", 0.0, None, 0.01, retry_after=retry_after, detail="429: busy")


def test_arrivals_are_a_poisson_process_whose_scale_alone_depends_on_the_rate():
    slow, fast = arrivals_s(0.5, 4000, 3), arrivals_s(5, 4000, 3)
    assert slow == pytest.approx([10 * moment for moment in fast])
    gaps = np.diff(slow)
    assert gaps.mean() == pytest.approx(2, rel=0.05)
    assert gaps.std() == pytest.approx(2, rel=0.05)  # as large as the mean: exponential
    assert slow[0] == 0


def test_every_system_draws_the_same_requests_and_a_longer_draw_begins_alike():
    traffic = ServedTraffic(documents=30, per_request=4, seed=1)
    assert traffic.draw(9)[:5] == traffic.draw(5)
    assert all(len(set(request.documents)) == 4 for request in traffic.draw(50))
    drawn = [number for request in traffic.draw(400) for number in request.documents]
    assert drawn.count(0) > 2 * drawn.count(9) > 0
    assert len({request.question for request in traffic.draw(50)}) == 50


def test_every_document_is_brought_before_as_the_first_and_after_its_previous_one():
    covering = ServedTraffic(documents=10, per_request=4).covering()
    assert [request.documents for request in covering] == [(n, (n + 1) % 10) for n in range(10)]
    assert min(request.number for request in covering) < 0


def test_impossible_traffic_is_refused():
    with pytest.raises(InvalidRequest, match="9 chunks per query cannot be drawn"):
        ServedTraffic(documents=8, per_request=9)


def test_a_prefix_cache_finds_documents_only_after_the_same_ones():
    before, asked = [ServedRequest(0, (1, 2, 3), "")], [(1, 2, 9), (2, 1, 3), (2, 1, 4)]
    requests = [ServedRequest(number, documents, "") for number, documents in enumerate(asked, 1)]
    # 1 and 2 of the first; nothing of the second; 2 and 1 of the third, after the second
    assert exact_prefix_share(requests, before) == pytest.approx(4 / 9)


def test_refused_requests_are_counted_and_are_endless_for_the_tail():
    replies = [answered(n, 1 + n / 100) for n in range(97)] + [refused(97), refused(98), refused(99, False)]
    phase = summarize(replies, system="default", **KNOWN)
    assert (phase.answered, phase.refused, phase.failed, phase.refused_without_time) == (97, 3, 0, 1)
    assert phase.ttft.p95 == pytest.approx(np.percentile([1 + n / 100 for n in range(97)], 95))
    assert phase.ttft_p95_of_all == pytest.approx(1.94)  # the 95th of 100
    assert phase.requests_per_s == pytest.approx(97 / phase.seconds)
    many = summarize([*replies, *(refused(100 + n) for n in range(10))], system="default", **KNOWN)
    assert many.ttft_p95_of_all is None
    assert parse_phase(json.loads(json.dumps(asdict(phase)))) == phase


def test_the_longest_gaps_are_told_with_the_longest_of_all_and_older_logs_have_none():
    replies = [replace(answered(n, 1), longest_gap_s=n / 10) for n in range(101)] + [answered(101, 1)]
    phase = summarize(replies, system="default", **KNOWN)
    assert (phase.gap.p50, phase.gap.p95, phase.gap.longest) == pytest.approx((5, 9.5, 10))
    content = json.loads(json.dumps(asdict(phase)))
    assert parse_phase(content) == phase
    del content["gap"]
    assert parse_phase(content) == replace(phase, gap=None)


def test_a_phase_without_answers_has_no_percentiles():
    phase = summarize([refused(0)], system="default", **KNOWN)
    assert (phase.ttft, phase.tpot, phase.ttft_p95_of_all, phase.requests_per_s) == (None, None, None, 0)


def test_throughput_within_a_time_is_interpolated_between_rates():
    curve = [(1.0, 0.2), (3.0, 0.4), (None, 0.5)]
    assert throughput_within(curve, 2.0) == (pytest.approx(0.3), False)
    assert throughput_within(curve, 0.5) == (None, False)  # even the lowest rate takes longer
    assert throughput_within(curve, 9.0) == (0.4, False)  # not beyond a rate at which requests were refused
    assert throughput_within(curve[:2], 9.0) == (0.4, True)  # it may serve more than was tried
    assert throughput_within([], 1.0) == (None, False)


def phase(system, rate, tail, served):
    made = summarize([answered(0, tail)], system=system, **KNOWN)
    return replace(made, rate=rate, ttft_p95_of_all=tail, requests_per_s=served)


def test_systems_are_compared_with_the_baseline_at_the_same_time():
    phases = [phase("prefix", 0.1, 2.0, 0.1), phase("prefix", 0.2, 6.0, 0.2)]
    phases += [
        phase("default", 0.1, 0.5, 0.1),
        phase("default", 0.4, 4.0, 0.4),
        phase("full", 0.1, 9.0, 0.05),
    ]
    found = {row.system: row for row in at_equal_ttft(phases, "prefix", [4.0])}
    assert found["prefix"].requests_per_s == pytest.approx(0.15)
    assert found["default"].of_baseline == pytest.approx(0.4 / 0.15)
    assert (found["full"].requests_per_s, found["full"].of_baseline) == (None, None)


def test_without_times_the_baseline_has_a_figure_at_each_of_its_own():
    tails = (2.00049, 6.12345678)  # digits that rounding would lose
    phases = [phase("prefix", rate, tail, rate) for rate, tail in zip((0.1, 0.2), tails, strict=True)]
    found = at_equal_ttft(phases, "prefix")
    assert [(row.ttft_s, row.requests_per_s, row.of_baseline) for row in found] == [
        (tails[0], pytest.approx(0.1), 1.0),
        (tails[1], pytest.approx(0.2), 1.0),
    ]


def test_rates_beyond_two_that_saturate_a_system_are_left_out():
    saturated = [phase("full", 0.2, 9.0, 0.1), phase("full", 0.4, 9.0, 0.1)]
    assert not is_saturated(saturated[:1], "full", seed=0)
    assert is_saturated(saturated, "full", seed=0)
    assert not is_saturated(saturated, "default", seed=0)
    arrived_s = arrivals_s(1.0, 20, seed=0)[-1]  # of few arrivals, the span is not their number over the rate
    served = [replace(phase("full", rate, 9.0, rate * 20 / arrived_s), requests=20) for rate in (0.2, 0.4)]
    assert not is_saturated(served, "full", seed=0)
    slow = [replace(one, requests_per_s=0.7 * one.requests_per_s) for one in served]
    assert is_saturated(slow, "full", seed=0)


def test_unknown_systems_and_missing_weights_are_refused(tmp_path):
    common = SystemSettings(model=None, gguf=None, context_tokens=100, new_tokens=4)
    assert chosen_systems((), common) == ("default", "full", "prefix", "no-async", "no-share")
    assert chosen_systems(("prefix", "weave", "prefix"), common) == ("prefix", "weave")
    with pytest.raises(InvalidRequest, match="no system 'vllm'"):
        chosen_systems(("vllm",), common)
    with pytest.raises(InvalidRequest, match="give --gguf"):
        chosen_systems(("llama-server",), common)
    assert "llama-server" in chosen_systems((), replace(common, gguf=tmp_path))


def test_systems_have_the_common_rates_or_their_own():
    systems = ("default", "prefix")
    assert chosen_rates(("0.3", "0.1"), systems) == ((0.1, 0.3), {})
    assert chosen_rates(("0.3", "prefix=0.1", "prefix=0.05"), systems) == ((0.3,), {"prefix": (0.05, 0.1)})
    assert chosen_rates(("default=1", "prefix=0.1"), systems) == ((), {"default": (1.0,), "prefix": (0.1,)})
    assert chosen_rates((), systems) == ((), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "'fast' is no rate"),
        ("0", "at least 0.001"),
        ("nan", "is no rate"),
        ("prefix=", "is no rate"),
        ("full=0.1", "--system full adds it"),
        ("prefix=0.1", "default is left without a rate; give --rate default=RATE too"),
    ],
)
def test_rates_that_cannot_be_measured_are_refused(text, message):
    with pytest.raises(InvalidRequest, match=message):
        chosen_rates((text,), ("default", "prefix"))
