"""Metrics under our names and vLLM's."""

from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from kvweave.server.metrics import VLLM, Metrics


def test_vllm_names_are_an_option_and_carry_the_same_values():
    metrics = Metrics()
    plan = SimpleNamespace(
        cache_hit=None, exact_tokens=30, reused_tokens=50, recomputed_tokens=5, fresh_tokens=15
    )
    answer = SimpleNamespace(finish_reason="stop", plan=plan, timing=SimpleNamespace(decode_s=2.0))
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
