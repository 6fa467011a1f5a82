"""Metrics under our names and vLLM's, and their types."""

import time
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvweave.models.batcher import BatchStats
from kvweave.results import Piece
from kvweave.server.metrics import VLLM, Metrics

GAUGES = {
    *("num_requests_running", "num_requests_waiting", "kv_bytes", "shared_kv_bytes", "passes_waiting"),
    *("pass_longest_seconds", "batch_requests_most"),  # the largest so far: it has no rate
}
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"),
}
"""Names and types as vLLM has them."""


def families(metrics, model=None):
    return {each.name: each for each in text_string_to_metric_families(metrics.text(model).decode())}


def watched():
    metrics = Metrics()
    metrics.watch(SimpleNamespace(batcher=None, shared_bytes=0))
    return metrics


def test_what_only_grows_is_a_counter_and_what_is_distributed_a_histogram():
    metrics = watched()
    with metrics.request(time.perf_counter()):
        pass
    own = families(metrics, "gemma")
    kinds = {}
    for name, family in own.items():
        space, _, rest = name.partition(":")
        assert space == "kvweave" or kinds[rest] == family.type  # the alias of vLLM has the same type
        kinds[rest] = family.type
    # the library adds to each counter and histogram when it began
    gauges = {name for name, kind in kinds.items() if kind == "gauge" and not name.endswith("_created")}
    assert gauges == GAUGES
    assert {name for name, kind in kinds.items() if kind == "histogram"} == HISTOGRAMS
    assert {kinds[name] for name in kinds if name in ("passes", "pass_seconds", "kv_evictions")} == {
        "counter"
    }


def test_passes_are_counted_by_the_batcher():
    stats = BatchStats(passes=3, rows=70, requests=5, most_requests=2, seconds=1.5, longest_s=0.75)
    models = SimpleNamespace(batcher=SimpleNamespace(stats=stats, waiting=4), shared_bytes=10)
    metrics = Metrics()
    metrics.watch(models)
    text = metrics.text().decode()
    for line in (
        "passes_total 3.0",
        "pass_rows_total 70.0",
        "pass_requests_total 5.0",
        "pass_seconds_total 1.5",
    ):
        assert f"kvweave:{line}\n" in text
    assert "kvweave:passes_waiting 4.0\n" in text
    models.batcher = None  # the model is not loaded
    assert "kvweave:passes_total 0.0\n" in metrics.text().decode()


def test_evictions_are_counted_over_stores_that_open_and_close():
    class Store:
        evicted = 0

        def stats(self):
            return SimpleNamespace(by_tier={"disk": SimpleNamespace(bytes=7)})

    def evictions():
        return families(metrics)["kvweave:kv_evictions"].samples[0].value

    metrics, one, two = Metrics(), Store(), Store()
    one.evicted, two.evicted = 3, 4
    metrics.count_stores([one, two])
    metrics.count_stores([one, two])
    assert evictions() == 7
    one.evicted = 5
    metrics.count_stores([one])  # the other one is closed
    assert evictions() == 9
    assert 'kvweave:kv_bytes{tier="disk"} 7.0' in metrics.text().decode()


def test_the_longest_gap_between_two_pieces_is_in_the_histogram(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("kvweave.server.metrics.perf_counter", lambda: now[0])
    metrics = Metrics()
    with metrics.request(9.0) as observed:
        for moment in (11.0, 11.003, 12.5):
            now[0] = moment
            observed(Piece("word "))
    samples = {
        (each.name, each.labels.get("le")): each.value
        for each in families(metrics)["kvweave:inter_token_latency_seconds"].samples
    }
    counted = [
        samples["kvweave:inter_token_latency_seconds_bucket", le] for le in ("0.005", "1.0", "2.0", "+Inf")
    ]
    assert counted == [1, 1, 2, 2]
    assert samples["kvweave:inter_token_latency_seconds_sum", None] == pytest.approx(1.5)
    assert metrics.registry.get_sample_value("kvweave:request_queue_time_seconds_sum") == 1.0
    assert metrics.registry.get_sample_value("kvweave:time_to_first_token_seconds_sum") == 2.0


def test_vllm_names_are_an_option_and_carry_the_same_values():
    metrics = Metrics()
    with metrics.request(time.perf_counter()):
        pass
    plan = SimpleNamespace(
        cache_hit=None, exact_tokens=30, reused_tokens=50, recomputed_tokens=5, fresh_tokens=15
    )
    answer = SimpleNamespace(
        finish_reason="stop", plan=plan, timing=SimpleNamespace(ttft_s=0.5, decode_s=2.0)
    )
    finished = SimpleNamespace(answer=answer, prompt_tokens=100, completion_tokens=5, cached_tokens=75)
    metrics.finished(finished, 3.0)
    assert b"vllm:" not in metrics.text()
    samples = {}
    for family in text_string_to_metric_families(metrics.text("gemma").decode()):
        for each in family.samples:
            samples[each.name, each.labels.get("finished_reason")] = each.value, each.labels.get("model_name")
    assert samples["vllm:prompt_tokens_total", None] == (100, "gemma")
    assert samples["vllm:generation_tokens_total", None] == (5, "gemma")
    assert samples["vllm:prefix_cache_queries_total", None] == (100, "gemma")
    assert samples["vllm:prefix_cache_hits_total", None] == (75, "gemma")
    assert samples["vllm:request_success_total", "stop"] == (1, "gemma")
    assert samples["vllm:e2e_request_latency_seconds_sum", None] == (3.0, "gemma")
    assert samples["vllm:request_time_per_output_token_seconds_sum", None] == (0.5, "gemma")
    aliased = {name.removeprefix("vllm:") for name, _ in samples if name.startswith("vllm:")}
    assert all(any(name.startswith(each) for name in aliased) for each in VLLM)
    assert samples["kvweave:prompt_tokens_total", None] == (100, None)
