"""Prometheus metrics: requests, latencies, tokens, queue length and running sequences."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron.inference.server.engine_thread import EngineThread

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """Prometheus metrics of one server."""

    def __init__(self, engine_thread: EngineThread):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "megatron_requests",
            "Requests; status 0: the client has disconnected.",
            ["path", "status"],
            registry=self._registry,
        )
        self._latency = Histogram(
            "megatron_request_seconds",
            "Time from a request to the end of its answer.",
            ["path"],
            buckets=_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(_OfEngine(engine_thread))

    def count(self, path: str, status: int, took_s: float) -> None:
        """Count one request."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(took_s)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _OfEngine(Collector):
    def __init__(self, engine_thread: EngineThread):
        self._engine_thread = engine_thread

    def collect(self) -> Iterator[Metric]:
        thread = self._engine_thread
        yield CounterMetricFamily(
            "megatron_generated_tokens", "Generated tokens.", value=thread.num_tokens
        )
        yield CounterMetricFamily(
            "megatron_prompt_tokens", "Tokens of accepted prompts.", value=thread.num_prompt_tokens
        )
        yield CounterMetricFamily(
            "megatron_reused_prompt_tokens",
            "Tokens of prompts that the KV cache had.",
            value=thread.engine.counters.reused_prompt_tokens,
        )
        yield CounterMetricFamily(
            "megatron_draft_tokens",
            "Tokens proposed by speculative decoding.",
            value=thread.engine.counters.draft_tokens,
        )
        yield CounterMetricFamily(
            "megatron_accepted_draft_tokens",
            "Proposed tokens that were generated.",
            value=thread.engine.counters.accepted_tokens,
        )
        yield GaugeMetricFamily(
            "megatron_sequences_waiting", "Waiting sequences.", value=thread.num_waiting
        )
        yield GaugeMetricFamily(
            "megatron_sequences_running", "Running sequences.", value=thread.num_running
        )
