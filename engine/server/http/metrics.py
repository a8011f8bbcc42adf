"""What is counted, in Prometheus' format: requests and tokens as they end, the engine's state when asked.

Names of models come from the registry, paths from the routes, so that no client can make new time series.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.server.decoding.worker import Figures
from engine.server.record import Record

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _State(Collector):
    """The engine's state as gauges."""

    def __init__(self, figures: Callable[[], Figures], admitted: Callable[[], int]) -> None:
        self._figures, self._admitted = figures, admitted

    def collect(self) -> Iterator[Metric]:
        """One gauge a figure."""
        now = self._figures()
        yield _gauge("requests_active", "Requests that take turns in the engine", now.active)
        yield _gauge("requests_admitted", "Requests that are worked on or wait", self._admitted())
        yield _gauge("models_loaded", "Models in memory", len(now.models))
        yield _gauge("sessions_idle", "Sessions kept for the next turn of a conversation", now.sessions)
        cache = GaugeMetricFamily(
            "kakeya_kv_cache_bytes", "Bytes of keys and values, and of drafters' memories", labels=["state"]
        )
        cache.add_metric(["active"], now.active_bytes)
        cache.add_metric(["idle"], now.idle_bytes)
        yield cache
        yield _gauge("memory_bytes", "Bytes of arrays in use, models included", now.memory_bytes)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kakeya_{name}", text, value=value)


class Metrics:
    """The metrics of one server."""

    def __init__(self, figures: Callable[[], Figures], admitted: Callable[[], int]) -> None:
        """Count from zero.

        Args:
            figures: the engine's state.
            admitted: requests that are worked on or wait.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_State(figures, admitted))
        own = self._registry
        self._requests = Counter(
            "kakeya_requests", "Requests that ended", ["path", "model", "status"], registry=own
        )
        self._seconds = Histogram(
            "kakeya_request_seconds", "From request to last byte", ["path"], buckets=SECONDS, registry=own
        )
        self._first = Histogram(
            "kakeya_first_token_seconds",
            "From request to first token",
            ["model"],
            buckets=SECONDS,
            registry=own,
        )
        self._prompt = Counter("kakeya_prompt_tokens", "Tokens of prompts", ["model"], registry=own)
        self._cached = Counter(
            "kakeya_prompt_tokens_cached", "… of these that were held already", ["model"], registry=own
        )
        self._written = Counter("kakeya_completion_tokens", "Tokens of answers", ["model"], registry=own)
        self._drafted = Counter("kakeya_drafted_tokens", "Drafts that were verified", ["model"], registry=own)
        self._accepted = Counter("kakeya_accepted_tokens", "… of these confirmed", ["model"], registry=own)
        self._rounds = Counter("kakeya_verify_rounds", "Forwards over a block", ["model"], registry=own)

    def count(self, record: Record, path: str) -> None:
        """A request has ended.

        Args:
            record: of the request.
            path: of the route that served it, or ``other``.
        """
        model = record.model or "none"
        self._requests.labels(path, model, str(record.status)).inc()
        self._seconds.labels(path).observe(record.seconds)
        if record.model is None:
            return
        if record.first_s is not None:
            self._first.labels(model).observe(record.first_s)
        self._prompt.labels(model).inc(record.prompt_tokens)
        self._cached.labels(model).inc(record.cached_tokens)
        self._written.labels(model).inc(record.completion_tokens)
        self._drafted.labels(model).inc(record.drafted)
        self._accepted.labels(model).inc(record.accepted)
        self._rounds.labels(model).inc(record.verify_rounds)

    def text(self) -> bytes:
        """All of it."""
        return generate_latest(self._registry)
