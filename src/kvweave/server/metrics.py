"""Metrics in Prometheus' format under kvweave's names, and optionally under vLLM's where vLLM has the same metric."""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from time import perf_counter
from typing import Any, Final
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvweave.kvstore.chunk_store import ChunkStore
from kvweave.models.batcher import BatchStats
from kvweave.results import Piece
from kvweave.server.serving.completions import Finished
from kvweave.state.resident import ResidentModels

SECONDS: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 1, 2, 4, 8)
TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[float, ...]]]] = {
    "time_to_first_token_seconds": ("Time to the first piece of an answer.", SECONDS),
    "inter_token_latency_seconds": ("Time from one piece of an answer to the next.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per token after an answer's first.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Time from a request's arrival to the end of its answer.", SECONDS),
    "request_queue_time_seconds": ("Time that requests waited in the queue.", SECONDS),
    "request_prefill_time_seconds": ("Time from a request's start to its first token.", SECONDS),
    "request_decode_time_seconds": ("Time from an answer's first token to its last.", SECONDS),
    "request_prompt_tokens": ("Tokens of each prompt.", TOKENS),
    "request_generation_tokens": ("Tokens of each answer.", TOKENS),
}
COUNTERS: Final[Mapping[str, str]] = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of answers.",
    "prefix_cache_queries": "Prompt tokens looked up in stored KV.",
    "prefix_cache_hits": "Prompt tokens found in stored KV and not computed.",
    "exact_tokens": "Prompt tokens whose stored KV was exact.",
    "reused_tokens": "Prompt tokens whose stored KV came from another context.",
    "recomputed_tokens": "Prompt tokens with stored KV that were recomputed.",
    "fresh_tokens": "Prompt tokens without stored KV.",
    "answer_cache_hits": "Questions answered from the answer cache.",
    "kv_evictions": "Entries that stores have evicted from the disk.",
}
VLLM: Final = frozenset(
    {
        *HISTOGRAMS,
        *("num_requests_running", "num_requests_waiting", "request_success"),
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    }
)
"""Metrics with the same name and meaning in vLLM."""


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = self._gauge("num_requests_running", "Requests being computed.")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting in the queue.")
        self.seconds_and_sizes = {
            name: Histogram(f"kvweave:{name}", text, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.counts = {name: self._counter(name, text) for name, text in COUNTERS.items()}
        self.succeeded = self._counter("request_success", "Finished answers by reason.", "finished_reason")
        self.failed = self._counter(
            "request_failure", "Requests that failed or were cancelled, by reason.", "reason"
        )
        self.tier_bytes = self._gauge("kv_bytes", "Stored KV of the open stores, by tier.", "tier")
        self._evicted_by: WeakKeyDictionary[ChunkStore, int] = WeakKeyDictionary()
        self._guard = Lock()
        self.http = self._counter("http_requests", "HTTP requests by route and status.", "route", "status")

    def watch(self, models: ResidentModels) -> None:
        """Export the figures of these models' packed passes."""

        def stats() -> BatchStats:
            return BatchStats() if models.batcher is None else models.batcher.stats

        def shown(name: str, text: str, value: Callable[[], float]) -> None:
            self._gauge(name, text).set_function(value)

        self.registry.register(_PassCounters(stats))
        shown("pass_longest_seconds", "Longest call of the model.", lambda: stats().longest_s)
        shown("batch_requests_most", "Most requests in one call.", lambda: stats().most_requests)
        shown(
            "passes_waiting",
            "Requests whose pass waits or runs.",
            lambda: 0 if models.batcher is None else models.batcher.waiting,
        )
        shown(
            "shared_kv_bytes",
            "Memory of the stored KV that running requests share.",
            lambda: models.shared_bytes,
        )

    def count_stores(self, stores: Iterable[ChunkStore]) -> None:
        """Update the sizes and evictions of the open stores from their databases."""
        sizes: Counts[str] = Counts()
        for store in stores:
            sizes.update({tier: totals.bytes for tier, totals in store.stats().by_tier.items()})
            with self._guard:  # two readers at once must not count an entry twice
                evicted = store.evicted
                self.counts["kv_evictions"].inc(evicted - self._evicted_by.get(store, 0))
                self._evicted_by[store] = evicted
        for tier, size_bytes in sizes.items():
            self.tier_bytes.labels(tier=tier).set(size_bytes)

    @contextmanager
    def request(self, arrived_s: float) -> Iterator[Callable[[Any], None]]:
        """Measure a request that arrived at `arrived_s` (`time.perf_counter`); yield the function that takes its events.

        Like vLLM's, the times include the time in the queue.
        """
        self.observe("request_queue_time_seconds", perf_counter() - arrived_s)
        last_s = 0.0

        def event(event: Any) -> None:
            nonlocal last_s
            if isinstance(event, Piece):
                now = perf_counter()
                name = "inter_token_latency_seconds" if last_s else "time_to_first_token_seconds"
                self.observe(name, now - (last_s or arrived_s))
                last_s = now
            if isinstance(event, Finished):
                self.finished(event, perf_counter() - arrived_s)

        try:
            yield event
        except BaseException as error:
            self.failed.labels(reason=type(error).__name__).inc()
            raise

    def observe(self, name: str, value: float) -> None:
        self.seconds_and_sizes[name].observe(value)

    def finished(self, of: Finished, seconds: float) -> None:
        answer, plan = of.answer, of.answer.plan
        self.observe("e2e_request_latency_seconds", seconds)
        self.succeeded.labels(finished_reason=answer.finish_reason).inc()
        if plan.cache_hit is not None:
            self.counts["answer_cache_hits"].inc()
            return
        self.observe("request_prefill_time_seconds", answer.timing.ttft_s)
        self.observe("request_decode_time_seconds", answer.timing.decode_s)
        self.observe("request_prompt_tokens", of.prompt_tokens)
        self.observe("request_generation_tokens", of.completion_tokens)
        counted = {
            "prompt_tokens": of.prompt_tokens,
            "generation_tokens": of.completion_tokens,
            "prefix_cache_queries": of.prompt_tokens,
            "prefix_cache_hits": of.cached_tokens,
            "exact_tokens": plan.exact_tokens,
            "reused_tokens": plan.reused_tokens,
            "recomputed_tokens": plan.recomputed_tokens,
            "fresh_tokens": plan.fresh_tokens,
        }
        for name, value in counted.items():
            self.counts[name].inc(value)
        if of.completion_tokens > 1:
            per_token_s = answer.timing.decode_s / (of.completion_tokens - 1)
            self.observe("request_time_per_output_token_seconds", per_token_s)

    def text(self, vllm_model: str | None = None) -> bytes:
        """Return all metrics in Prometheus' format.

        With `vllm_model`, the label `model_name` of vLLM's metrics, they appear under vLLM's names too.
        """
        found = generate_latest(self.registry)
        if vllm_model is None:
            return found
        aliases = CollectorRegistry()
        aliases.register(_Aliases(self.registry, vllm_model))
        return found + generate_latest(aliases)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"kvweave:{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvweave:{name}", text, labels, registry=self.registry)


class _PassCounters(Collector):
    """Exports the batcher's counts."""

    def __init__(self, stats: Callable[[], BatchStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield CounterMetricFamily("kvweave:passes", "Calls of the model.", stats.passes)
        yield CounterMetricFamily("kvweave:pass_rows", "Rows of these calls.", stats.rows)
        yield CounterMetricFamily("kvweave:pass_requests", "Requests of these calls.", stats.requests)
        yield CounterMetricFamily("kvweave:pass_seconds", "Seconds of these calls.", stats.seconds)


class _Aliases(Collector):
    """Exports the metrics that vLLM has too, under its names and with its label `model_name`."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry, self._model = registry, model

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            name = metric.name.partition(":")[2]
            if name in VLLM:
                renamed = Metric(f"vllm:{name}", metric.documentation, metric.type)
                for sample in metric.samples:
                    labels = {"model_name": self._model, **sample.labels}
                    renamed.add_sample(sample.name.replace("kvweave:", "vllm:"), labels, sample.value)
                yield renamed
