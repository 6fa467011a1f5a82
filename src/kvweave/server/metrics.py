"""Metrics in Prometheus' format under kvweave's names, and optionally under vLLM's where vLLM has the same metric."""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
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
VLLM: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "e2e_request_latency_seconds",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
)
"""Metrics with the same name and meaning in vLLM."""


class ObservedRequest:
    """Measures one request from its arrival. Like vLLM's, the times include the time in the queue."""

    def __init__(self, metrics: "Metrics", arrived_s: float) -> None:
        self._metrics, self._began_s, self._last_s = metrics, arrived_s, 0.0

    def event(self, event: Any) -> None:
        if isinstance(event, Piece):
            now = perf_counter()
            if self._last_s:
                self._metrics.between_tokens_s.observe(now - self._last_s)
            else:
                self._metrics.first_token_s.observe(now - self._began_s)
            self._last_s = now
        if isinstance(event, Finished):
            self._metrics.finished(event, perf_counter() - self._began_s)


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.running = self._gauge("num_requests_running", "Requests being computed.")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting in the queue.")
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "Time to the first piece of an answer.", SECONDS
        )
        self.between_tokens_s = self._histogram(
            "inter_token_latency_seconds", "Time from one piece of an answer to the next.", TOKEN_SECONDS
        )
        self.per_token_s = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of each answer.",
            TOKEN_SECONDS,
        )
        self.latency_s = self._histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to the end of its answer.", SECONDS
        )
        self.queue_s = self._histogram(
            "request_queue_time_seconds", "Time that requests waited in the queue.", SECONDS
        )
        self.prefill_s = self._histogram(
            "request_prefill_time_seconds", "Time from a request's start to its first token.", SECONDS
        )
        self.decode_s = self._histogram(
            "request_decode_time_seconds", "Time from an answer's first token to its last.", SECONDS
        )
        self.prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of each prompt.", TOKENS)
        self.answer_sizes = self._histogram("request_generation_tokens", "Tokens of each answer.", TOKENS)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generated = self._counter("generation_tokens", "Tokens of answers.")
        self.queried = self._counter("prefix_cache_queries", "Prompt tokens looked up in stored KV.")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens found in stored KV and not computed.")
        self.exact = self._counter("exact_tokens", "Prompt tokens whose stored KV was exact.")
        self.reused = self._counter(
            "reused_tokens", "Prompt tokens whose stored KV came from another context."
        )
        self.recomputed = self._counter(
            "recomputed_tokens", "Prompt tokens with stored KV that were recomputed."
        )
        self.fresh = self._counter("fresh_tokens", "Prompt tokens without stored KV.")
        self.answer_hits = self._counter("answer_cache_hits", "Questions answered from the answer cache.")
        self.succeeded = self._counter("request_success", "Finished answers by reason.", "finished_reason")
        self.failed = self._counter(
            "request_failure", "Requests that failed or were cancelled, by reason.", "reason"
        )
        self.tier_bytes = self._gauge("kv_bytes", "Stored KV of the open stores, by tier.", "tier")
        self.evicted = self._counter("kv_evictions", "Entries that stores have evicted from the disk.")
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
                self.evicted.inc(evicted - self._evicted_by.get(store, 0))
                self._evicted_by[store] = evicted
        for tier, size_bytes in sizes.items():
            self.tier_bytes.labels(tier=tier).set(size_bytes)

    @contextmanager
    def request(self, arrived_s: float) -> Iterator[ObservedRequest]:
        """Measure a request that arrived at `arrived_s` (`time.perf_counter`) and runs inside this context."""
        self.queue_s.observe(perf_counter() - arrived_s)
        try:
            yield ObservedRequest(self, arrived_s)
        except BaseException as error:
            self.failed.labels(reason=type(error).__name__).inc()
            raise

    def finished(self, of: Finished, seconds: float) -> None:
        answer = of.answer
        self.latency_s.observe(seconds)
        self.succeeded.labels(finished_reason=answer.finish_reason).inc()
        if answer.plan.cache_hit is not None:
            self.answer_hits.inc()
            return
        self.prefill_s.observe(answer.timing.ttft_s)
        self.decode_s.observe(answer.timing.decode_s)
        self.prompt_sizes.observe(of.prompt_tokens)
        self.answer_sizes.observe(of.completion_tokens)
        self.prompt_tokens.inc(of.prompt_tokens)
        self.generated.inc(of.completion_tokens)
        self.queried.inc(of.prompt_tokens)
        self.hits.inc(of.cached_tokens)
        for counter, name in (
            (self.exact, "exact_tokens"),
            (self.reused, "reused_tokens"),
            (self.recomputed, "recomputed_tokens"),
            (self.fresh, "fresh_tokens"),
        ):
            counter.inc(getattr(answer.plan, name))
        if of.completion_tokens > 1:
            self.per_token_s.observe(answer.timing.decode_s / (of.completion_tokens - 1))

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

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvweave:{name}", text, buckets=buckets, registry=self.registry)


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
