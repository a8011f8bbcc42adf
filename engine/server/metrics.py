"""What is noted of a request: a line of the log, figures for the metrics; no content, unless asked for."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.server.scheduler import SchedulerStats

requests = logging.getLogger("kakeya.requests")


@dataclass
class RequestRecord:
    """One request, filled in as it goes on its way.

    Attributes:
        method, path: of HTTP.
        client: its address.
        status: of the answer; 499 where the client had gone before there was one.
        model, channel, drafter: that served it.
        stream: whether it was streamed.
        prompt_tokens, cached_tokens, completion_tokens: of the usage.
        drafted, accepted, verify_rounds: of speculation.
        first_s: until the first token was there, since the request came.
        seconds: until the last byte.
        finish: why the answer ended; gone where the client left before.
        error: the code of a refusal.
        content: prompt and answer, where they are logged.
        owner: whose key it came with, a part of its digest; empty without keys.
    """

    method: str
    path: str
    client: str
    started: float = field(default_factory=perf_counter)
    status: int = 0
    model: str | None = None
    channel: str | None = None
    drafter: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verify_rounds: int = 0
    first_s: float | None = None
    seconds: float = 0.0
    finish: str | None = None
    error: str | None = None
    content: dict[str, str] | None = None
    owner: str = ""

    def saw_tokens(self, count: int) -> None:
        """Tokens are there."""
        self.completion_tokens += count
        if self.first_s is None:
            self.first_s = perf_counter() - self.started

    def end(self) -> None:
        """The last byte was sent, or will never be."""
        self.seconds = perf_counter() - self.started
        self.status = self.status or 499

    def line(self) -> str:
        """One JSON object; what is unknown or zero is left out."""
        fields = asdict(self)
        for name in ("started", "owner"):
            del fields[name]
        told: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        for name, value in fields.items():
            if value:  # zeros say nothing that their absence does not
                told[name] = round(value, 6) if isinstance(value, float) else value
        return json.dumps(told)


def log(record: RequestRecord) -> None:
    """Write a request to the log."""
    requests.info("%s", record.line())


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _State(Collector):
    """The engine's state as gauges."""

    def __init__(self, figures: Callable[[], SchedulerStats], admitted: Callable[[], int]) -> None:
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

    def __init__(self, figures: Callable[[], SchedulerStats], admitted: Callable[[], int]) -> None:
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

    def count(self, record: RequestRecord, path: str) -> None:
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
