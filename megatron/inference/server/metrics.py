"""What a monitor may ask: requests, tokens, queue and latencies, in Prometheus' text format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron.inference.server.engine_thread import EngineLoop

_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The counts of one server."""

    def __init__(self, engine_loop: EngineLoop):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "megatron_requests",
            "Requests answered; status 0: the client left.",
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
        self._registry.register(_OfEngine(engine_loop))

    def answered(self, path: str, status: int, took_s: float) -> None:
        """Count one request."""
        self._requests.labels(path, str(status)).inc()
        self._latency.labels(path).observe(took_s)

    def text(self) -> bytes:
        """Return all counts."""
        return generate_latest(self._registry)


class _OfEngine(Collector):
    def __init__(self, engine_loop: EngineLoop):
        self._loop = engine_loop

    def collect(self) -> Iterator[Metric]:
        loop = self._loop
        yield CounterMetricFamily(
            "megatron_generated_tokens", "Tokens chosen.", value=loop.num_tokens
        )
        yield CounterMetricFamily(
            "megatron_prompt_tokens", "Tokens of prompts taken.", value=loop.num_prompt_tokens
        )
        yield GaugeMetricFamily(
            "megatron_sequences_waiting", "Sequences that wait.", value=loop.num_waiting
        )
        yield GaugeMetricFamily(
            "megatron_sequences_running", "Sequences under way.", value=loop.num_running
        )
