"""What is recorded of a request: a line in the log, and Prometheus metrics; no content, unless asked for.

No client can create a time series: names of models come from the registry and paths from the routes.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.server.scheduler import SchedulerStats
from engine.server.schema import CacheTier

request_log = logging.getLogger("kakeya.requests")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# field of a record -> (metric, help)
COUNTERS = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts"),
    "cached_tokens": ("prompt_tokens_cached", "… of these that were held already"),
    "completion_tokens": ("completion_tokens", "Tokens of answers"),
    "drafted": ("drafted_tokens", "Drafts that were verified"),
    "accepted": ("accepted_tokens", "… of these confirmed"),
    "verify_rounds": ("verify_rounds", "Forwards over a block"),
}


@dataclass
class RequestRecord:
    """One request, filled in while it is served."""

    method: str
    path: str
    client: str
    started: float = field(default_factory=perf_counter)
    status: int = 0  # of the answer; 499 where the client left before there was one
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
    first_s: float | None = None  # from the request to the first token
    seconds: float = 0.0  # from the request to the last byte
    finish: str | None = None  # why the answer ended; gone where the client left before
    error: str | None = None  # the code of a refusal
    content: dict[str, str] | None = None  # prompt and answer, where they are logged
    owner: str = ""  # part of the digest of the API key; empty without keys
    sees_all: bool = True  # whether its key may see what others do

    def add_tokens(self, count: int) -> None:
        self.completion_tokens += count
        if self.first_s is None:
            self.first_s = perf_counter() - self.started

    def end(self) -> None:
        self.seconds = perf_counter() - self.started
        self.status = self.status or 499
        line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        for name, value in asdict(self).items():
            if value and name not in {"started", "owner", "sees_all"}:
                line[name] = round(value, 6) if isinstance(value, float) else value
        request_log.info("%s", json.dumps(line))


class _CacheCounters(Collector):
    """What the prompt cache has counted, read when asked."""

    def __init__(self, stats: Callable[[], SchedulerStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        now = self._stats()
        text = "Requests that began from a snapshot of an earlier one"
        hits = CounterMetricFamily("kakeya_prompt_cache_hits", text, labels=["tier"])
        for tier in get_args(CacheTier):
            hits.add_metric([tier], now.cache_hits.get(tier, 0))
        yield hits
        text = "Bytes that the prompt cache wrote to its folder"
        yield CounterMetricFamily("kakeya_prompt_cache_written_bytes", text, value=now.disk.written_bytes)
        text = "Snapshots that were not written, as the hour's budget or the queue was full"
        yield CounterMetricFamily("kakeya_prompt_cache_skipped", text, value=now.disk.skipped)


class Counters:
    """What is counted of requests as they end."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        timing = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self._requests = counter("kakeya_requests", "Requests that ended", ["path", "model", "status"])
        self._seconds = timing("kakeya_request_seconds", "From request to last byte", ["path"])
        self._first = timing("kakeya_first_token_seconds", "From request to first token", ["model"])
        self._counters = {
            name: counter(f"kakeya_{metric}", text, ["model"]) for name, (metric, text) in COUNTERS.items()
        }

    def count(self, record: RequestRecord, path: str) -> None:
        model = record.model or "none"
        self._requests.labels(path, model, str(record.status)).inc()
        self._seconds.labels(path).observe(record.seconds)
        if record.model is None:
            return
        if record.first_s is not None:
            self._first.labels(model).observe(record.first_s)
        for name, counter in self._counters.items():
            counter.labels(model).inc(getattr(record, name))


class Metrics:
    """The metrics of one server: requests and tokens as they end, the engine's state when asked.

    Each API key has counters of its own, so that none sees what others do; gauges are of all of them.
    """

    def __init__(self, stats: Callable[[], SchedulerStats], admitted: Callable[[], int]) -> None:
        # the `_created` samples are gauges, and a key is shown counters of its own requests alone
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._all, self._own = Counters(), defaultdict[str, Counters](Counters)
        gauges: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("requests_active", "Requests that are decoded", lambda: stats().active),
            ("requests_admitted", "Requests that are served or wait", admitted),
            ("models_loaded", "Models in memory", lambda: len(stats().models)),
            ("prompt_cache_entries", "Snapshots of prompts in memory", lambda: stats().cached),
            ("prompt_cache_disk_entries", "… in files", lambda: stats().disk.entries),
            ("prompt_cache_disk_bytes", "Bytes of these files", lambda: stats().disk.nbytes),
            ("memory_bytes", "Bytes of arrays in use, models included", lambda: stats().memory_bytes),
        )
        registry = self._all.registry
        for name, text, value in gauges:
            Gauge(f"kakeya_{name}", text, registry=registry).set_function(value)
        text = "Bytes of keys and values, and of drafters' memories"
        cache = Gauge("kakeya_kv_cache_bytes", text, ["state"], registry=registry)
        cache.labels("active").set_function(lambda: stats().active_bytes)
        cache.labels("cached").set_function(lambda: stats().cached_bytes)
        registry.register(_CacheCounters(stats))

    def count(self, record: RequestRecord, path: str) -> None:
        """Count a request that has ended; `path` is its route, or ``other``."""
        self._all.count(record, path)
        if record.owner:
            self._own[record.owner].count(record, path)

    def text(self, owner: str | None = None) -> bytes:
        """All metrics, or those of one key's requests."""
        counters = self._all if owner is None else self._own[owner]
        return generate_latest(counters.registry)
